"""`--tenant` and `--tenant-group`: what they make, and a sentence for what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockyard import InvalidArgument
from blockyard.tenants import OTHERS, Tenant, TenantGroup
from blockyard_engine.cli.tenants import tenants_asked
from blockyard_serve.cli.tenant_keys import say_who_is_refused, tenant_keys


def test_they_are_tenants_of_a_pool_of_any_size() -> None:
    options = ("acme,weight=3,min=25%,max=500,max-idle=10%,max-retained=7,key-env=K", "ann,group=free", "*,max=10%")
    asked = tenants_asked(options, ("free,weight=2,min=1%,max=90%",))
    assert asked is not None
    for usable in (999, 1998):
        acme = Tenant("acme", 3, usable // 4, 500, usable // 10, 7)
        free = TenantGroup("free", (Tenant("ann"),), 2, usable // 100, usable * 9 // 10)
        assert asked(usable) == (acme, Tenant(OTHERS, max_held=usable // 10), free)
    assert tenants_asked((), ()) is None


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    (tmp_path / "key").write_text("from the file\n")
    monkeypatch.setenv("KEY_OF_BOB", "from the environment")
    keys = tenant_keys((f"acme,key-file={tmp_path / 'key'}", "bob,weight=2,key-env=KEY_OF_BOB", "open"))
    assert keys == {"acme": "from the file", "bob": "from the environment"}
    with pytest.raises(InvalidArgument, match="--tenant acme has key-env and key-file; give one of the two"):
        tenant_keys(("acme,key-env=KEY_OF_BOB,key-file=/nowhere",))


@pytest.mark.parametrize(
    ("tenants", "groups", "message"),
    [
        (("",), (), "name has 0 characters"),
        (
            ("a,floor=3",),
            (),
            "--tenant 'a' has 'floor=3', which is none of weight=, min=, max=, max-idle=, max-retained=",
        ),
        (("a,min",), (), "--tenant 'a' has 'min', which is none of"),
        (("a,min=1,min=1",), (), "--tenant 'a' has 'min=1', twice"),
        (("a,min=-1",), (), "min of tenant 'a' is '-1'; it must be a number of blocks, or of percent from 0% to 100%"),
        (("a,min=101%",), (), "min of tenant 'a' is '101%'"),
        (("a,max=1e3",), (), "max of tenant 'a' is '1e3'"),
        (("a,max=" + "9" * 5000,), (), "max of tenant 'a' is '9{199}"),
        (("a,max=999999999999",), (), "max_held of 'a' is 999999999999; it must be from 0 to"),
        (("a,weight=50%",), (), "weight of tenant 'a' is '50%'; it must be a whole number"),
        (("a,weight=0",), (), "weight of 'a' is 0"),
        (("a", "a"), (), "tenants has the name 'a' twice"),
        (("a,group=g",), (), "--tenant 'a' has group=g; there is no --tenant-group of that name"),
        ((), ("g",), r"members of 'g' is \(\)"),
        (
            ("a,group=g",),
            ("g,max-idle=3",),
            "--tenant-group 'g' has 'max-idle=3', which is none of weight=, min=, max=",
        ),
        (tuple(f"t{number}" for number in range(10_001)), (), "--tenant is given 10001 times; the limit is 10000"),
    ],
)
def test_what_is_no_tenant(tenants: tuple[str, ...], groups: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tenants_asked(tenants, groups)


def test_it_is_said_who_is_refused_where_the_server_has_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    for api_key, keys in ((None, {}), ("ours", {"acme": "secret"})):
        say_who_is_refused(api_key, keys)
    assert capsys.readouterr().err == ""
    say_who_is_refused(None, {"acme": "secret", "bob": "other"})
    told = capsys.readouterr().err
    assert "only requests with the API key of a tenant are taken (2 tenants have one)" in told
    assert "secret" not in told
