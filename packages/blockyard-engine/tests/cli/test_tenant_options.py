"""`--tenant` and `--tenant-group`: the tenants that they make, and errors for invalid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockyard import InvalidArgument
from blockyard.tenants import OTHERS, Tenant, TenantGroup
from blockyard_engine.cli.tenant_options import tenant_factory
from blockyard_serve.cli.serve import warn_about_access
from blockyard_serve.cli.tenant_keys import tenant_keys


def test_tenant_options_fit_a_pool_of_any_size() -> None:
    options = ("acme,weight=3,min=25%,max=500,max-idle=10%,max-retained=7,key-env=K", "ann,group=free", "*,max=10%")
    asked = tenant_factory(options, ("free,weight=2,min=1%,max=90%",))
    assert asked is not None
    for usable in (999, 1998):
        acme = Tenant("acme", 3, usable // 4, 500, usable // 10, 7)
        free = TenantGroup("free", (Tenant("ann"),), 2, usable // 100, usable * 9 // 10)
        assert asked(usable) == (acme, Tenant(OTHERS, max_held=usable // 10), free)
    assert tenant_factory((), ()) is None


def test_an_api_key_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    (tmp_path / "key").write_text("from the file\n")
    monkeypatch.setenv("KEY_OF_BOB", "from the environment")
    keys = tenant_keys((f"acme,key-file={tmp_path / 'key'}", "bob,weight=2,key-env=KEY_OF_BOB", "open"))
    assert keys == {"acme": "from the file", "bob": "from the environment"}
    with pytest.raises(InvalidArgument, match="--tenant acme has both key-env and key-file; give only one"):
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
def test_invalid_tenant_options_are_refused(tenants: tuple[str, ...], groups: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tenant_factory(tenants, groups)


def test_refused_tenants_are_printed_if_the_server_has_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    access = {"host": "127.0.0.1", "cors_origins": ()}
    for api_key, keys in ((None, {}), ("ours", {"acme": "secret"})):
        warn_about_access({**access, "api_key": api_key, "tenant_keys": keys})
    assert capsys.readouterr().err == ""
    warn_about_access({**access, "api_key": None, "tenant_keys": {"acme": "secret", "bob": "other"}})
    printed = capsys.readouterr().err
    assert "only requests with the key of one of 2 tenants are accepted" in printed
    assert "secret" not in printed
