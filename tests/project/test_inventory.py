# SPDX-License-Identifier: Apache-2.0
"""Nothing that a user has may go: whatever ``tests/data/inventory.txt`` lists is there, by the name it had."""

import re

import pytest
from inventory import FILE, KINDS, ROOT, gone, is_there, main, moved, recorded

RECORDED = recorded()


def test_every_kind_is_listed() -> None:
    assert [*RECORDED] == [*KINDS]
    assert all(RECORDED.values())


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["--check"], 2)])
def test_what_is_no_request_to_write_writes_nothing(arguments, status, capsys) -> None:
    before = FILE.stat().st_mtime_ns
    with pytest.raises(SystemExit, match=str(status)):
        main(arguments)
    assert FILE.stat().st_mtime_ns == before
    assert "usage" in "".join(capsys.readouterr())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_user_has_is_gone(kind) -> None:
    if kind == "documents and files":
        pytest.importorskip("msgspec")
    # A name that nobody has is among them, so that each kind is seen to look.
    assert gone(kind, [*RECORDED[kind], "no_such_name"]) == ["no_such_name"]


@pytest.mark.parametrize(
    ("before", "is_good"),
    [
        # Today (args, *, pg_loss, train_log_probs, ..., **kwargs)
        ("mis_ext.compute_mis_weights_with_cp(args, *, pg_loss)", False),
        ("mis_ext.compute_mis_weights_with_cp(*, args)", False),
        # Today (args, batch, logits, sum_of_sample_mean=)
        ("mis_ext.policy_loss(args, batch, logits)", True),
        ("mis_ext.policy_loss(args, batch, logits, sum_of_sample_mean)", True),
        ("mis_ext.policy_loss(args, logits, batch)", False),
        ("mis_ext.policy_loss(args, batch, logits=)", False),
        ("mis_ext.policy_loss(args, batch, logits, sum_of_sample_mean=, reducer=)", False),
        ("mis_ext.policy_loss(args, batch)", False),
        # Today all by name, and none needed
        ("mis_ext.Weight(*, level=, high=)", True),
        ("mis_ext.Weight(*, level=, height=)", False),
        ("mis_ext.Weight(level=)", False),
        ("mis_ext.Weight.height", False),
        ("mis_ext.reports", False),
        ("mis_ext.report.Summary.overalls", False),
    ],
)
def test_a_signature_may_grow_but_not_shrink(before, is_good) -> None:
    assert (gone("dotted paths and signatures", [before]) == []) is is_good


def test_every_page_and_script_that_the_package_names_is_there() -> None:
    name = re.compile(r"\b(?:docs|benchmarks|lab|examples)/[\w/]+\.(?:md|py|sh)(?:#[\w-]+)?")
    named = {each for file in (ROOT / "mis_ext").rglob("*.py") for each in name.findall(file.read_text("utf-8"))}
    assert [each for each in sorted(named) if not is_there(each)] == []
    assert len(named) > 10


def test_an_old_address_of_a_page_or_a_place_leads_to_one_that_is_there() -> None:
    assert [new for new in moved().values() if not is_there(new)] == []
    assert [old for old in moved() if (ROOT / old.partition("#")[0]).exists()] == []
    assert is_there("docs/watch.md#whose-limits-these-are")
    assert not is_there("docs/watch.md#nowhere")
