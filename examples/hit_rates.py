"""How much of several sets of prompts comes from the prefix cache, and what decides it.

Run it with: python examples/hit_rates.py
"""

import random

from blockyard import CacheConfig, CacheSalt, KVCacheManager, LoRA

BLOCK_SIZE = 16
PREFIX = "Translate the following to French: "
Requests = list[tuple[list[int], tuple[object, ...]]]


def run(requests: Requests, num_blocks: int = 1000, block_size: int = BLOCK_SIZE) -> KVCacheManager:
    """Return a cache in which the requests have run, one after another."""
    cache = KVCacheManager(
        CacheConfig(num_blocks=num_blocks, block_size=block_size, max_num_seqs=1, max_model_len=1024)
    )
    for tokens, keys in requests:
        seq = cache.allocate(tokens, extra_keys=keys)
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        cache.free(seq)
    cache.check()
    return cache


def hit_rate(requests: Requests, num_blocks: int = 1000) -> float:
    """Return the share of all prompt tokens that were cached."""
    return run(requests, num_blocks).stats().hit_rate


def print_sentences(unit: str, prompts: list[list[int]], block_size: int = BLOCK_SIZE) -> None:
    """Print the hit rate of a few short prompts, in blocks (a partly filled one counts) and in tokens."""
    stats = run([(tokens, ()) for tokens in prompts], block_size=block_size).stats()
    hits = stats.num_hit_tokens // block_size
    blocks = sum(-(-len(tokens) // block_size) for tokens in prompts)
    rates = f"{hits} of {blocks} blocks ({hits / blocks:.1%}), {stats.hit_rate:.1%} of {stats.num_prompt_tokens} tokens"
    print(f"{unit}, in blocks of {block_size}: {rates}")


def prompts(shared: int, own: int, count: int = 50) -> Requests:
    """Return `count` prompts with the same first `shared` tokens, each followed by `own` tokens of its own."""
    chooser = random.Random(shared)
    beginning = [chooser.randrange(50000) for _ in range(shared)]
    return [(beginning + [chooser.randrange(50000) for _ in range(own)], ()) for _ in range(count)]


def keyed(requests: Requests, keys: list[tuple[object, ...]]) -> Requests:
    """Return the same prompts, each with one of these keys in turn."""
    return [(tokens, keys[number % len(keys)]) for number, (tokens, _) in enumerate(requests)]


def sentences() -> None:
    """Return four requests to translate. Their shared prefix fills several blocks as bytes, but not one as words."""
    texts = [PREFIX + text for text in ("Hello", "Goodbye", "Good morning", "Thank you")]
    print_sentences("a token a byte", [list(text.encode()) for text in texts])
    vocabulary: dict[str, int] = {}
    words = [[vocabulary.setdefault(word, len(vocabulary)) for word in text.split()] for text in texts]
    print_sentences("a token a word", words)  # a common prefix of 5 tokens fills no block of 16, so nothing can hit
    print_sentences("a token a word", words, block_size=4)


def main() -> None:
    sentences()
    print()
    same = prompts(shared=160, own=40)
    sets = {
        "nothing in common": hit_rate(prompts(shared=0, own=200)),
        "the first 160 of 200 tokens": hit_rate(same),
        "the first 150: a block less": hit_rate(prompts(shared=150, own=50)),
        "the first 15: less than a block": hit_rate(prompts(shared=15, own=185)),
        "160, but their first token differs": hit_rate([([n, *tokens], keys) for n, (tokens, keys) in enumerate(same)]),
        "160, two LoRA adapters": hit_rate(keyed(same, [(LoRA("a"),), (LoRA("b"),)])),
        "160, each tenant its own salt": hit_rate([(t, (CacheSalt(str(n)),)) for n, (t, _) in enumerate(same)]),
        "160, a pool of 14 blocks": hit_rate(same, num_blocks=15),
        "160, every other prompt unrelated": hit_rate(mixed(same)),
        "the same, in a pool of 14 blocks": hit_rate(mixed(same), num_blocks=15),
    }
    for name, rate in sets.items():
        print(f"{name:<36} {rate:6.1%}")


def mixed(requests: Requests) -> Requests:
    """Return the prompts, each followed by one that shares nothing with any other."""
    others = prompts(shared=0, own=200, count=len(requests))
    return [request for pair in zip(requests, others, strict=True) for request in pair]


if __name__ == "__main__":
    main()
