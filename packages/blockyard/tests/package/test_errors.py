"""The tree of errors: who is whose child, and that every name is what its docstring draws."""

from __future__ import annotations

import importlib
import pickle

import pytest

import blockyard
from blockyard import errors

TREE = {
    "BlockyardError": "Exception",
    "CapacityError": "BlockyardError",
    "OutOfBlocks": "CapacityError",
    "OutOfRows": "CapacityError",
    "NeverFits": "CapacityError",
    "OverBudget": "CapacityError",
    "NotEnoughMemory": "CapacityError",
    "LogicError": "BlockyardError",
    "UnknownSequence": "LogicError",
    "DoubleFree": "LogicError",
    "ForeignBlock": "LogicError",
    "SequenceNotReady": "LogicError",
    "StalePlan": "LogicError",
    "StepsInFlight": "LogicError",
    "StaleBlocks": "LogicError",
    "DivergedRank": "LogicError",
    "ConcurrentCall": "LogicError",
    "PolicyError": "LogicError",
    "PublisherError": "BlockyardError",
    "HandoffError": "BlockyardError",
    "PeerMismatch": "HandoffError",
    "StaleOffer": "HandoffError",
    "InvalidArgument": "BlockyardError",
    "InvariantError": "BlockyardError",
    "MissingExtra": "BlockyardError",
    "ModelError": "BlockyardError",
    "RankError": "BlockyardError",
    "TraceError": "BlockyardError",
}


def defined() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }


def test_the_tree() -> None:
    assert {name: error.__bases__[0].__name__ for name, error in defined().items()} == TREE


#: Where the errors of a room stand for the public, besides `blockyard.errors`; all others stand in `blockyard`.
ROOM_OF = {
    "DivergedRank": "steps",
    "PublisherError": "events",
}
#: Errors that companions raise, and export; `blockyard.errors` has them for all.
OF_COMPANIONS = {"HandoffError", "ModelError", "PeerMismatch", "RankError", "StaleOffer", "TraceError"}


def test_every_error_is_public_and_drawn() -> None:
    for name, error in defined().items():
        if name not in OF_COMPANIONS:
            face = importlib.import_module(f"blockyard.{ROOM_OF[name]}") if name in ROOM_OF else blockyard
            assert getattr(face, name) is error
            assert name in face.__all__
        assert name in (errors.__doc__ or "")
        assert error.__doc__


def test_an_error_of_a_room_is_no_name_of_the_package() -> None:
    assert (set(ROOM_OF) | OF_COMPANIONS) & set(blockyard.__all__) == set()


@pytest.mark.parametrize(
    ("name", "builtin"),
    [("InvalidArgument", ValueError), ("MissingExtra", ImportError), ("NotEnoughMemory", MemoryError)],
)
def test_errors_that_are_also_pythons(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(blockyard, name), builtin)


def test_out_of_blocks_carries_its_numbers() -> None:
    error = blockyard.OutOfBlocks("too many", 5, 3)
    assert (str(error), error.num_needed, error.num_free) == ("too many", 5, 3)
    assert blockyard.OutOfBlocks("too many").num_needed == 0


@pytest.mark.parametrize("name", TREE)
def test_errors_cross_processes(name: str) -> None:
    error = getattr(errors, name)("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "what happened"


def test_numbers_cross_processes() -> None:
    again = pickle.loads(pickle.dumps(blockyard.OutOfBlocks("too many", 5, 3)))
    assert (again.num_needed, again.num_free) == (5, 3)
