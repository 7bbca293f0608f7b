"""Prompts of the demo (questions of a railway's passengers), and its report as text and JSON."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from blockyard import __version__, compiled
from blockyard.cli import as_json as json_text
from blockyard.cli import build_name
from blockyard.observe import PoolSnapshot, draw_pool

from .. import GenerationResult

HANDBOOK = """\
You answer questions of passengers of Northline Rail. Here is what passengers must know. Answer in one short sentence.

- Bicycles travel free on every train, but need a booking before the journey. Folding bicycles need no booking.
- Dogs and cats travel free. Each passenger may bring two animals. Animals may not sit on a seat.
- Each passenger may bring two suitcases and one small bag.
- Children under 5 travel free. Children from 5 to 15 pay half of the price.
- Students and people over 65 get a discount of 30 percent, but not before 9:30 on weekdays.
- Groups of six or more people get a discount of 20 percent.
- A single ticket is valid on one day. A return ticket is valid for 30 days.
- A ticket that was not used is refunded within 28 days, for a fee of 5 pounds.
- An advance ticket cannot be refunded. Its date can be changed for 10 pounds.
- If your train is cancelled, you get all of your money back.
- If your train is 30 minutes late, you get half of your money back. If it is 60 minutes late, you get all of it.
- To claim money back, fill in the form on the website and add a photograph of your ticket.
- A seat reservation costs 2 pounds. To Port Ellery it is free. A reserved seat is kept for 15 minutes.
- Coach C is the quiet coach. Coach B sells coffee, sandwiches and soup until 21:00.
- Wi-Fi is free in every coach. There is a power socket at every second seat.
- Smoking is not allowed on trains and platforms.
- Passengers in wheelchairs call 0800 555 010 one day before the journey to ask for a ramp.
- Lost property is kept at Harwick station for 90 days. Collecting it costs 3 pounds. Keys and passports are free.
- The first train leaves Harwick at 5:40 and the last train leaves at 23:10. On Sundays trains begin at 7:30.
- The journey from Harwick to Dunmore takes 50 minutes. The journey from Harwick to Port Ellery takes 105 minutes.
"""

QUESTIONS = (
    "What time does the first train leave Harwick on a Monday?",
    "How long does the journey from Harwick to Port Ellery take?",
    "Does my folding bicycle need a booking?",
    "How do I claim money back for a delay?",
    "Can I bring my bicycle on the train to Dunmore?",
    "My train arrived 40 minutes late. What do I get back?",
    "Is there Wi-Fi on board?",
    "I left my umbrella on the train last week. Where can I find it?",
    "How long is a return ticket valid?",
    "Do I have to pay for my daughter? She is four years old.",
    "Which coach is the quiet one?",
    "Can I get my money back for an advance ticket?",
    "I would like to travel with two dogs. What does it cost?",
    "Where can I buy a coffee on the train?",
    "How much does a seat reservation to Port Ellery cost?",
    "I am in a wheelchair and need a ramp. What should I do?",
    "My train was cancelled. Do I get a refund?",
    "May I smoke on the platform?",
    "We are a group of eight friends. Is there a discount?",
    "Can I charge my laptop on the train?",
    "How many suitcases may I bring?",
    "I found out that I cannot travel on Friday. Can I change the date of my advance ticket?",
    "Is there a discount for students at 8 in the morning on a Tuesday?",
    "When does the last train leave Harwick?",
    "My passport is in your lost property office. What do I pay to collect it?",
    "At what time do trains begin on Sundays?",
    "How long is my reserved seat kept if I am late?",
    "My son is twelve. What does his ticket cost?",
    "Can my cat sit on the seat next to me?",
    "I did not use my single ticket yesterday. Can I have my money back?",
    "Do you sell hot soup at ten in the evening?",
    "I am 70 years old. Do I pay less for a ticket on Saturday morning?",
)


def question(number: int) -> str:
    """Return the question of request `number`, from 0; they repeat after the last."""
    return QUESTIONS[number % len(QUESTIONS)]


def demo_prompts(num_requests: int, tokenizer: Any) -> list[Any]:
    """Return chats of handbook and question, or plain text if the tokenizer has no chat template."""
    if tokenizer.chat_template:
        return [
            [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question(number)}]
            for number in range(num_requests)
        ]
    return [f"{HANDBOOK}\nPassenger: {question(number)}\nHelp desk:" for number in range(num_requests)]


_WIDTH = 78


@dataclass(slots=True)
class DemoReport:
    """Statistics of one run; times are in seconds.

    Attributes:
        wasted_share: share of held slots without a token, over all steps.
        fullest: the pool after the step that held most blocks.
        at_end: the pool at the end.
        leaking: sequences that still hold blocks at the end, handle to holder.
        note: a sentence about the answers.
        verified_same_tokens: whether a second run with the prefix cache toggled gave the same tokens; None without one.
        other_seconds: duration of the second run.
    """

    model: str
    dtype: str
    device: str
    prefix_cache: bool
    results: list[GenerationResult]
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    bytes_per_block: int
    peak_used_blocks: int
    max_running: int
    wasted_share: float
    load_seconds: float
    seconds: float
    fullest: PoolSnapshot
    at_end: PoolSnapshot
    num_leaked_blocks: int
    leaking: dict[int, str]
    note: str = ""
    verified_same_tokens: bool | None = None
    other_seconds: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(result.num_prompt_tokens for result in self.results)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache."""
        return sum(result.num_cached_tokens for result in self.results)

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens found in the cache, 0 to 1."""
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions."""
        return sum(result.num_preemptions for result in self.results)

    @property
    def contiguous_blocks(self) -> int:
        """Blocks that as many concurrent requests need if each reserves the model's whole context in advance."""
        return self.max_running * -(-self.max_model_len // self.block_size)

    def mib(self, num_blocks: int) -> float:
        """Return the MiB of keys and values in `num_blocks` blocks."""
        return num_blocks * self.bytes_per_block / 2**20


#: Fields of a report that have the same names in JSON.
_FIGURES = (
    *("model", "dtype", "device", "prefix_cache", "max_num_seqs", "block_size", "num_blocks", "max_model_len"),
    *("num_prompt_tokens", "num_cached_tokens", "cached_share", "num_new_tokens", "num_preemptions"),
    *("peak_used_blocks", "contiguous_blocks", "bytes_per_block", "wasted_share", "load_seconds", "seconds"),
    *("num_leaked_blocks", "verified_same_tokens", "other_seconds"),
)


def as_json(report: DemoReport) -> str:
    """Return the report as one JSON object; shares are from 0 to 1, times in seconds, memory in bytes."""
    results = [
        {
            "question": question(number),
            "answer": result.text.strip(),
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason.value,
            "num_prompt_tokens": result.num_prompt_tokens,
            "num_cached_tokens": result.num_cached_tokens,
            "num_preemptions": result.num_preemptions,
        }
        for number, result in enumerate(report.results)
    ]
    figures = {name: getattr(report, name) for name in _FIGURES}
    derived = {
        "compiled": compiled(),
        "num_requests": len(report.results),
        "new_tokens_per_second": report.num_new_tokens / report.seconds,
    }
    return json_text({**figures, **derived, "results": results})


def as_text(report: DemoReport, num_answers: int) -> str:
    """Return answers, a table, a picture of the pool, and the leak check."""
    answers = [*_answers(report, num_answers), report.note]
    rows = [*_token_rows(report), *_block_rows(report), *_time_rows(report)]
    labels, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    table = "\n".join(f"{label:<{labels}}  {value:>{values}}  {note}".rstrip() for label, value, note in rows)
    head = (
        f"Blockyard {__version__}, {build_name()}\n"
        f"{report.model}, {report.dtype} on {report.device}: {len(report.results)} chat requests, "
        f"at most {report.max_num_seqs} at once, prefix cache {'on' if report.prefix_cache else 'off'}"
    )
    return "\n\n".join(part for part in (head, *answers, table, _pictures(report), _leaks(report)) if part)


def _answers(report: DemoReport, num_answers: int) -> list[str]:
    shown = []
    for number, result in list(enumerate(report.results))[:num_answers]:
        cut = " ..." if result.finish_reason.value == "length" else ""
        answer = " ".join(result.text.split()) + cut
        wrapped = textwrap.fill(answer, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        shown.append(f"{question(number)}\n{wrapped}")
    return shown


def _token_rows(report: DemoReport) -> list[tuple[str, str, str]]:
    return [
        ("prompt tokens", f"{report.num_prompt_tokens:,}", "in all requests together"),
        ("taken from the cache", f"{report.num_cached_tokens:,}", f"{report.cached_share:.1%}: not computed again"),
        ("new tokens", f"{report.num_new_tokens:,}", "in all answers"),
    ]


def _block_rows(report: DemoReport) -> list[tuple[str, str, str]]:
    peak, contiguous = report.peak_used_blocks, report.contiguous_blocks
    return [
        (
            "blocks at peak",
            f"{peak:,}",
            f"of {report.block_size} tokens: {report.mib(peak):,.1f} MiB of keys and values",
        ),
        (
            "contiguous reservation",
            f"{contiguous:,}",
            f"{report.mib(contiguous):,.1f} MiB, {contiguous / peak:,.0f} times as much, for {report.max_running} "
            f"concurrent requests",
        ),
        ("", "", f"if each reserves the model's {report.max_model_len:,} tokens in advance"),
        ("internal waste", f"{report.wasted_share:.1%}", "of the slots in held blocks had no token, over all steps"),
        ("preemptions", f"{report.num_preemptions:,}", "requests preempted to make room for others"),
    ]


def _time_rows(report: DemoReport) -> list[tuple[str, str, str]]:
    rows = [
        ("time", f"{report.seconds:.1f} s", f"and {report.load_seconds:.1f} s to load the model"),
        ("speed", f"{report.num_new_tokens / report.seconds:,.0f}", "new tokens a second"),
    ]
    if report.other_seconds is not None:
        other = "off" if report.prefix_cache else "on"
        same = "the same tokens" if report.verified_same_tokens else "OTHER TOKENS"
        rows.append((f"prefix cache {other}", f"{report.other_seconds:.1f} s", f"a second run to compare: {same}"))
    return rows


def _pictures(report: DemoReport) -> str:
    usable = report.num_blocks - 1
    return (
        f"The pool after its fullest step, {report.fullest.num_held} of {usable} blocks held:\n"
        f"{textwrap.indent(draw_pool(report.fullest), '  ')}\n\n"
        f"The pool at the end:\n{textwrap.indent(draw_pool(report.at_end), '  ')}"
    )


def _leaks(report: DemoReport) -> str:
    if report.num_leaked_blocks == 0:
        return f"0 blocks leaked: all {report.num_blocks - 1} are free again, and check() found all invariants hold."
    holders = ", ".join(report.leaking.values()) or "none"
    return f"{report.num_leaked_blocks} BLOCKS LEAKED, held by {holders}."
