# SPDX-License-Identifier: Apache-2.0
"""`mis-ext report` on files of the hosts, on broken ones, and what it writes."""

import json
import os
import re
from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
import torch
from archived import unpacked
from commands import json_of
from engines import COUNT, engines

import mis_ext
from mis_ext.tools.cli import main
from mis_ext.tools.cli.report import _name_of
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.explain import traps_of
from mis_ext.tools.report.page import render_page
from mis_ext.tools.report.recommendation import circumstances_of, file_candidate, preset_candidates
from mis_ext.tools.report.whole_report import make_report

pytest.importorskip("jinja2")
pytest.importorskip("rich")
HOST_DUMPS = Path(__file__).parents[1] / "data" / "host_dumps" / "dumps.tar.xz"
REPOSITORY = Path(__file__).parents[2]


def write_dumps(folder: Path, *, kernels: float, steps: int = 2) -> Path:
    """Files as slime writes them, with rewards and advantages."""
    folder.mkdir(parents=True)
    for step in range(steps):
        samples = [
            {
                "sample_index": number,
                "tokens": torch.arange(len(proximal) + 3),
                "response_lengths": len(proximal),
                "loss_masks": torch.ones(len(proximal), dtype=torch.int32),
                "log_probs": proximal,
                "rollout_log_probs": behavior,
                "rewards": float(number % 2),
                "advantages": torch.full((len(proximal),), number % 2 - 0.5),
            }
            for number, (proximal, behavior) in enumerate(zip(*engines(step, kernels=kernels).sampled(), strict=True))
        ]
        torch.save({"format_version": 2, "rollout_id": step, "samples": samples}, folder / f"{step}.pt")
    return folder


def write_lines(path: Path, rollouts: list[int | None]) -> Path:
    """JSON lines of pairs of samples, each pair of the group 0 of its rollout."""
    rows = [
        {"log_prob": [-0.5] * 4, "rollout_log_prob": [-0.6] * 4, "group_id": 0, "reward": reward, "advantage": reward}
        | ({} if rollout is None else {"rollout_id": rollout})
        for rollout in rollouts
        for reward in (-1.0, 1.0)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_line_of_json_may_say_its_rollout(tmp_path) -> None:
    report = make_report(Dumps([write_lines(tmp_path / "run.jsonl", [0, 1, 2, 3, 4, 5])]), [])
    assert {name: step.num_sequences for name, step in report.summary.steps.items()} == {str(n): 2 for n in range(6)}
    # A group is one of a step.
    assert report.summary.overall.num_prompts == 6
    assert report.skipped == ()


def test_several_files_without_a_rollout_are_said_to_be_one_step(tmp_path) -> None:
    # Of other lengths: the same bytes are read once.
    paths = [write_lines(tmp_path / f"{number}.jsonl", [None] * (number + 1)) for number in range(2)]
    report = make_report(Dumps(paths), [])
    assert [*report.summary.steps] == ["0"]
    assert report.skipped == (f"2 files, the first {paths[0]}: no rollout_id, so all their samples are step 0",)
    assert make_report(Dumps(paths[:1]), []).skipped == ()


class Page(HTMLParser):
    """What a browser would look for: where the page points to, and what it names."""

    VOID = ("meta", "link", "img", "br", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes) -> None:
        found = dict(attributes)
        self.tags.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        self.outside += [
            value for key, value in attributes if key in ("src", "href") and not value.startswith(("data:", "#"))
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def low_precision(tmp_path_factory) -> Path:
    """Written in the place of a report of long ago."""
    folder = tmp_path_factory.mktemp("report")
    dumps = write_dumps(folder / "run7" / "dumps" / "train_data", kernels=0.12)
    for number in range(2):
        os.utime(dumps / f"{number}.pt", (0, 12 * 60 * 60 * (1 + 2 * number)))
    (folder / "out").mkdir()
    arguments = ["--out", str(folder / "out"), "--preset", "mis", "--preset", "geometric_mis"]
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(StringIO()) as shown:
        patched.setenv("COLUMNS", "72")
        assert main(["report", str(dumps), *arguments]) == 0
    (folder / "terminal.txt").write_text(shown.getvalue())
    return folder / "out"


def test_every_number_is_in_the_json(low_precision) -> None:
    found = json.loads((low_precision / "summary.json").read_text())
    assert found["recommendation"]["name"] == "mis"
    assert "tis_upper_bound: 2.0" in found["recommendation"]["yaml"]
    assert [each["name"] for each in found["recommendation"]["ranking"]] == ["mis", "none", "geometric_mis"]
    assert [each["cause"] for each in found["diagnoses"]] == ["low_precision"]
    assert [*found["summary"]["steps"]] == ["0", "1"]
    assert found["summary"]["overall"]["num_sequences"] == 2 * COUNT
    assert found["summary"]["overall"]["reward"] == 0.5
    (gated,) = (each for each in found["recommendation"]["ranking"] if each["name"] == "geometric_mis")
    assert any("mis_max_reject_fraction" in text for text in gated["warnings"])


def test_the_page_and_the_terminal_say_shares_doubts_and_what_is_unexplained(low_precision) -> None:
    (found,) = json.loads((low_precision / "summary.json").read_text())["diagnoses"]
    assert found["k3_share"] == 1.0
    assert len(found["alternatives"]) == 6
    alternatives = "; ".join(found["alternatives"])
    page = (low_precision / "report.html").read_text()
    shown = (low_precision.parent / "terminal.txt").read_text()
    assert f"<p>Explains up to 100 % of k3.</p><p>The same evidence fits: {alternatives}.</p>" in page
    assert "explains up to 100 % of k3\n" in shown
    assert f"{found['confidence']}: {found['title']}" in " ".join(shown.split())
    for text in (page, shown):
        assert "The causes explain up to all of k3." in text


def test_a_narrow_terminal_shows_the_names_of_traps_whole(low_precision) -> None:
    shown = (low_precision.parent / "terminal.txt").read_text()
    ranking = json.loads((low_precision / "summary.json").read_text())["recommendation"]["ranking"]
    traps = {name for each in ranking for name in each["traps"]}
    assert "low_learning_rate" in traps
    assert [name for name in traps if name not in shown] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_the_page_needs_nothing_else_and_can_be_read_without_a_mouse(low_precision) -> None:
    text = (low_precision / "report.html").read_text()
    page = Page(text)
    assert page.outside == []
    assert page.open == []
    assert len(page.ids) == len({*page.ids})
    # Without another run nothing is compared.
    assert page.ids[:2] == ["what-to-do", "why"]
    targets = {found["href"][1:] for tag, found in page.tags if tag == "a"}
    assert targets == {*page.ids}
    assert all(found.get("aria-label") for tag, found in page.tags if tag == "svg")
    assert all(found.get("tabindex") == "0" for _, found in page.tags if found.get("class") == "scroll")
    # One script, which stands in the page, and no frame.
    assert [(tag, found) for tag, found in page.tags if tag in ("script", "iframe")] == [("script", {})]
    assert sorted(path.name for path in low_precision.iterdir()) == ["report.html", "summary.json"]
    # The first screen: k3 and its limit, its trend, the cause.
    values = re.findall(r'<div class="tile (\w+)"><p class="value">(.*?)</p><p>(.*?)</p>', text)
    overall = json.loads((low_precision / "summary.json").read_text())["summary"]["overall"]
    assert [severity for severity, _, _ in values] == ["watch", "good", "watch"]
    assert values[0][1:] == (f"{overall['k3']:.3g}", "k3 per token (harmless below 0.001)")
    assert values[1][2].startswith("k3 over 2 steps, at most 0.0")
    assert values[2][2] == "possible, explains up to 100 % of k3"
    # The sparkline and the chart.
    assert text.count("<polyline") == 2
    assert text.index('class="tiles"') < text.index('id="what-to-do"') < text.index("<figure>") < text.index('id="why"')


def test_the_title_has_the_name_of_the_run_and_the_date_of_its_last_file(low_precision) -> None:
    page = (low_precision / "report.html").read_text()
    assert "<title>Mismatch report: run7/dumps/train_data, 1970-01-02 " in page
    files = sorted((low_precision.parent / "run7" / "dumps" / "train_data").iterdir())
    assert _name_of(files) == "run7/dumps/train_data"


def test_kernels_alone_need_no_correction(tmp_path) -> None:
    dumps = write_dumps(tmp_path / "dumps", kernels=0.01, steps=1)
    found = make_report(Dumps([dumps / "0.pt"]), preset_candidates(["mis"])).recommendation
    assert (found.headline, found.name, found.yaml) == ("No correction is needed.", "none", "")


def test_what_has_to_be_repaired_first_leaves_nothing_to_paste(tmp_path) -> None:
    proximal = [-0.5 - (number % 7) / 4 for number in range(100)]
    behavior = [-9999.0] * 10 + proximal[10:]
    rows = [{"log_probs": proximal, "rollout_log_probs": behavior, "response_length": 100}] * 2
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = make_report(Dumps([tmp_path / "0.jsonl"]), preset_candidates(["mis"]))
    assert report.recommendation.headline.startswith("Repair this first: placeholders")
    assert (report.recommendation.name, report.recommendation.yaml) == ("mis", "")
    assert "To paste:" not in render_page(report)


@pytest.fixture(scope="module")
def host_dumps(tmp_path_factory) -> Path:
    return unpacked(HOST_DUMPS, tmp_path_factory.mktemp("hosts"))


def test_advantages_of_context_parallel_ranks_are_joined_as_their_log_probs_are(host_dumps, tmp_path) -> None:
    for path in (host_dumps / "miles" / "train_data").iterdir():
        content = torch.load(path)
        columns = content["rollout_data"]
        if "log_probs" in columns:
            assert content["cp_size"] > 1
            torch.save(content | {"rollout_data": columns | {"advantages": columns["log_probs"]}}, tmp_path / path.name)
    samples = [*Dumps(sorted(tmp_path.iterdir()))]
    assert len(samples) == 4
    for sample in samples:
        assert torch.equal(sample.advantages, sample.proximal_log_probs)


def test_worst_tokens_have_their_text(tmp_path) -> None:
    pytest.importorskip("transformers")
    from tiny_tokenizers import english_tokenizer

    tokenizer = english_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    ids = tokenizer.encode("The answer is forty-two.", add_special_tokens=False)
    behavior = [-1.0] * len(ids)
    row = {"tokens": ids, "rollout_log_probs": behavior, "log_probs": [*behavior[:-1], -4.0]}
    (tmp_path / "run.jsonl").write_text(json.dumps(row) + "\n")
    code, found = json_of("report", tmp_path / "run.jsonl", "--tokenizer", tmp_path / "tokenizer", "--preset", "mis")
    assert code == 0
    (worst,) = found["summary"]["worst_tokens"]
    before, own, behind = worst["text"]
    assert (own, behind) == (tokenizer.decode(ids[-1:]), "")
    assert before == tokenizer.decode(ids[:-1][-12:])


@pytest.mark.parametrize("placeholder", [-100, 2**40])
def test_a_worst_token_beside_a_placeholder_is_shown_by_ids(tmp_path, placeholder) -> None:
    pytest.importorskip("transformers")
    from tiny_tokenizers import english_tokenizer

    english_tokenizer().save_pretrained(tmp_path / "tokenizer")
    row = {"tokens": [5, placeholder, 7], "log_probs": [-1.0, -4.0], "rollout_log_probs": [-1.0, -1.0]}
    (tmp_path / "run.jsonl").write_text(json.dumps(row) + "\n")
    code, found = json_of("report", tmp_path / "run.jsonl", "--tokenizer", tmp_path / "tokenizer", "--preset", "mis")
    (worst,) = found["summary"]["worst_tokens"]
    assert (code, worst["text"][0]) == (0, str(placeholder))


def test_what_is_not_used_is_said(tmp_path) -> None:
    rows = [
        {"log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.1, -2.0], "advantages": 1.0, "reward": 1.0},
        {"log_probs": [-1.0], "rollout_log_probs": [-1.1, -2.0]},
        {"log_probs": None, "rollout_log_probs": [-1.1, -2.0]},
        {"log_probs": [-1.0, None], "rollout_log_probs": [-1.1, -2.0]},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = make_report(Dumps([path]), [])
    assert (report.summary.overall.num_tokens, report.summary.overall.num_without_ratio) == (3, 1)
    assert len(report.skipped) == 2
    lengths, missing = report.skipped
    assert "its sample 1: lists of different lengths: log_probs 1, rollout_log_probs 2" in lengths
    assert "its sample 2: no log-probs of the trainer: 'log_probs' is missing" in missing


def test_mixed_dtypes_are_compared_in_float32(tmp_path) -> None:
    path = tmp_path / "mixed.pt"
    values = -torch.rand(2, 80, generator=torch.Generator().manual_seed(0)) - 0.1
    torch.save({"log_probs": [*values.double()], "rollout_log_probs": [*values.bfloat16()]}, path)
    report = make_report(Dumps([path]), [])
    assert [each.cause for each in report.diagnoses] == ["bf16_log_probs"]
    assert "behavior" in report.diagnoses[0].evidence


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "miss"], "did you mean 'mis'"),
        (["--config", "nothing.yaml"], "nothing.yaml"),
        (["--worst", "-1"], "--worst"),
    ],
)
def test_wrong_usage_is_said(tmp_path, capsys, arguments, message) -> None:
    dumps = tmp_path / "run.jsonl"
    dumps.write_text('{"log_probs": [-1.0], "rollout_log_probs": [-1.0]}\n')
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(dumps), "--out", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err


def test_a_folder_without_dumps_is_named(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err


def test_a_configuration_of_ones_own_is_ranked_with_the_warnings_of_the_guards(tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("use_tis: true\ntis_level: sequence\ntis_upper_bound: 5.0\n")
    dumps = write_dumps(tmp_path / "dumps", kernels=0.3, steps=1)
    candidate = file_candidate(path)
    report = make_report(Dumps([dumps / "0.pt"]), [candidate])
    (ranked,) = (each for each in report.recommendation.ranking if each.name == str(path))
    assert any("effective sample size" in text for text in ranked.warnings)
    traps = traps_of(candidate.config, circumstances_of(ranked.outcome, report.summary))
    assert tuple(trap.text for trap in traps) == ranked.warnings


def test_presets_are_tried_once_each_and_the_default_is_first() -> None:
    candidates = preset_candidates()
    configs = [candidate.config for candidate in candidates]
    assert candidates[0].name == "mis"
    assert len({*configs}) == len(configs)
    assert {*configs} == {mis_ext.preset(name) for name in mis_ext.list_presets() if name != "metrics_only"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"rolout_log_probs": [-1.0]}, ("'rollout_log_probs'", "'log_probs', 'rolout_log_probs'", "did you mean 'rol")),
        ({"tokens": [1, 2]}, ("'rollout_log_probs'", "found are 'log_probs', 'tokens'")),
        ({"rollout_log_probs": [-1.0, -1.0]}, ("log_probs 1", "rollout_log_probs 2")),
        ({"rollout_log_probs": [-1.0], "loss_mask": [1, 1]}, ("log_probs 1", "loss_masks 2")),
        ({"loss_mask": [1, 1], "response_length": 1}, ("loss_masks has 2", "response_lengths is 1")),
    ],
)
def test_a_file_that_cannot_be_used_names_the_sample_the_keys_and_their_lengths(row, said, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"log_probs": [-1.0]} | row))
    with pytest.raises(ValueError, match="sample 0: ") as error:
        make_report(Dumps([path]), [])
    assert str(path) in str(error.value)
    for words in said:
        assert words in str(error.value)
    assert ("did you mean" in str(error.value)) == ("rolout_log_probs" in row)
