"""The demo asks questions of a railway's passengers; every request begins with the railway's handbook."""

from __future__ import annotations

from typing import Any

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
    """Returns the question of request `number`, counted from 0; after the last the first comes again."""
    return QUESTIONS[number % len(QUESTIONS)]


def demo_prompts(num_requests: int, tokenizer: Any) -> list[Any]:
    """Returns chats of handbook and question, or plain text where the tokenizer has no chat template."""
    if tokenizer.chat_template:
        return [
            [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question(number)}]
            for number in range(num_requests)
        ]
    return [f"{HANDBOOK}\nPassenger: {question(number)}\nHelp desk:" for number in range(num_requests)]
