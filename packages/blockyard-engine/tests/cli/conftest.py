"""Fixtures of the command tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and a word tokenizer without a chat template."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    from blockyard_engine.cli.demo_report import HANDBOOK
    from blockyard_testing.tiny_models import tiny_model

    folder = tmp_path_factory.mktemp("own-model")
    words = ["[UNK]", *dict.fromkeys(HANDBOOK.split())]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    tiny_model("llama-gqa", vocab_size=len(words), max_position_embeddings=1024).save_pretrained(folder)
    return folder
