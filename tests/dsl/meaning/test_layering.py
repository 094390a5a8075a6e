"""Imports, the file and `--set`, in layers; sweeps; which source set each value."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dslc.dsl.language.calls import Slurm, Text
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import SGD, Adam, AdamW
from dslc.dsl.meaning.load import LoadResult, load, load_each, load_text

BASE = """\
param rate = 0.1
model { network = [linear(10)], loss = cross_entropy() }
data { source = text("corpus.txt"), batch = 8 }
train { epochs = 2, optimizer = sgd(rate, momentum = 0.9) }
"""


def good(loaded: LoadResult) -> JobSpec:
    assert not loaded.report, [f"{d.code} {d.message}" for d in loaded.report]
    assert loaded.job is not None
    return loaded.job


def codes(loaded: LoadResult) -> list[str]:
    return [f"{d.code} {d.span}" for d in loaded.report]


def files(folder: Path, **texts: str) -> str:
    """Writes `name.plt` for each text, and returns the path of the last."""
    path = folder
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".plt")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(path)


# ------------------------------------------------------------------------------------------------------- imports


def test_blocks_merge_field_by_field_and_the_later_layer_wins(tmp_path: Path) -> None:
    job = good(load(files(
        tmp_path, base=BASE, more='import "base.plt"\ndata { workers = 1 }\nlog { every = 5 steps }',
        job='import "more.plt"\ndata { batch = 16 }\nlog { every = 7 steps }',
    )))  # fmt: skip
    assert (job.data.batch, job.data.workers, job.train.epochs) == (16, 1, 2)
    assert job.log.every.value == 7
    assert job.name == "job" and job.folder == str(tmp_path)


def test_a_value_is_replaced_whole(tmp_path: Path) -> None:
    path = files(tmp_path, base=BASE, job='import "base.plt"\ntrain { optimizer = adam(betas = [0.8, 0.9]) }')
    optimizer = good(load(path)).train.optimizer
    assert optimizer == Adam(betas=(0.8, 0.9))


def test_params_are_one_namespace_resolved_after_merging(tmp_path: Path) -> None:
    path = files(tmp_path, base=BASE, job='import "base.plt"\nparam rate = half / 2\nparam half = 0.5')
    assert good(load(path)).train.optimizer == SGD(lr=0.25, momentum=0.9)
    assert good(load(path, ["half=1"])).train.optimizer == SGD(lr=0.5, momentum=0.9)


def test_a_param_that_asks_for_a_value_takes_an_imports(tmp_path: Path) -> None:
    path = files(tmp_path, base=BASE, job='import "base.plt"\nparam rate')
    assert good(load(path)).train.optimizer == SGD(lr=0.1, momentum=0.9)


def test_each_file_is_read_once(tmp_path: Path) -> None:
    path = files(
        tmp_path, base=BASE, one='import "base.plt"\ndata { batch = 1 }', two='import "base.plt"',
        job='import "one.plt"\nimport "two.plt"\nimport "./base.plt"',
    )  # fmt: skip
    loaded = load(path)
    assert good(loaded).data.batch == 1, "what `two` imports again does not undo what `one` set"
    assert [os.path.basename(file) for file in loaded.files] == ["base.plt", "one.plt", "two.plt", "job.plt"]


def test_a_circle_shows_its_chain(tmp_path: Path) -> None:
    path = files(tmp_path, one='import "two.plt"', two='import "job.plt"', job='import "one.plt"\n' + BASE)
    (found,) = load(path).report
    assert found.code == "E0102"
    assert "`job.plt` -> `one.plt` -> `two.plt` -> `job.plt`" in found.message
    assert [os.path.basename(str(note.span)) for note in found.notes] == ["job.plt:1:8", "one.plt:1:8"]


def test_a_mistake_of_an_imported_file_points_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path, parts__base=BASE + "log { evry = 3 }\nmemory {", job='import "parts/base.plt"\n')
    monkeypatch.chdir(tmp_path)
    spans = [str(d.span) for d in load("job.plt").report]
    assert "parts/base.plt:5:7" in spans and "parts/base.plt:6:8" in spans


def test_what_could_not_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    loaded = load_text(BASE.replace("optimizer =", "optimizer ?").replace("batch = 8", "batch = "))
    assert not {"E0109", "W0101"} & {d.code for d in loaded.report}
    assert loaded.job is None
    loaded = load_text('import "missing.plt"\ndata { batch = 4 }', folder=str(tmp_path))
    assert codes(loaded) == ["E0101 job.plt:1:8"]


# ---------------------------------------------------------------------------------------------- one of a pair, none


def test_a_later_layer_removes_the_other_of_an_exclusive_pair(tmp_path: Path) -> None:
    path = files(tmp_path, base=BASE + "devices { cpus = 4 }", job='import "base.plt"\ndevices { gpus = 2 }')
    job = good(load(path, ["train.steps=10"]))
    assert (job.devices.gpus, job.devices.cpus) == (2, None)
    assert (job.train.steps, job.train.epochs) == (10, None)


def test_none_goes_back_to_the_default_and_removes_nothing_else() -> None:
    job = good(load_text(BASE + "devices { gpus = 2 }", settings=["devices.cpus=none", "devices.gpus=none"]))
    assert (job.devices.gpus, job.devices.cpus) == (None, None)
    job = good(load_text(BASE + "param way = none\nmemory { recompute = way }"))
    assert job.memory.recompute == "none"
    assert good(load_text(BASE, settings=["train.optimizer.momentum=none"])).train.optimizer == SGD(lr=0.1)
    assert codes(load_text(BASE, settings=["train.epochs=none"])) == ["E0109 job.plt:4:1"]
    assert codes(load_text(BASE, settings=["train.optimizer=none"]))[0] == "E0109 <--set 1>:1:1"


def test_a_block_as_a_whole_and_its_fields_exclude_each_other(tmp_path: Path) -> None:
    path = files(tmp_path, base=BASE + "parallelism { data = 1 }", job='import "base.plt"\nparallelism = auto')
    assert good(load(path)).parallelism.auto and good(load(path)).parallelism.data is None
    job = good(load(path, ["parallelism.tensor=2"]))
    assert (job.parallelism.auto, job.parallelism.tensor, job.parallelism.data) == (False, 2, None)
    assert good(load(path, ["parallelism.tensor=2", "parallelism=auto"])).parallelism.auto
    assert not good(load(path, ["parallelism=none"])).parallelism.auto


# ----------------------------------------------------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("rate=0.5", "train.optimizer.lr", 0.5),
        ("rate = 1 / 4", "train.optimizer.lr", 0.25),
        ("train.optimizer.lr=0.5", "train.optimizer.lr", 0.5),
        ("train.optimizer.lr=rate * 2", "train.optimizer.lr", 0.2),
        ("train.optimizer=adamw", "train.optimizer", AdamW()),
        ("parallelism.gradients=powersgd(4)", "parallelism.gradients.rank", 4),
        ("checkpoint.every=10min", "checkpoint.every.value", 600.0),
        ("data.source.context=64", "data.source.context", 64),
        ("devices.kind=h100", "devices.kind", "h100"),
        ("devices.gpus=0, 2", "devices.gpus", "0, 2"),
        ("devices.gpus=all", "devices.gpus", "all"),
        ("memory.offload=[optimizer]", "memory.offload", ("optimizer",)),
        ("memory.recompute=every(2)", "memory.recompute.n", 2),
        ("launch.with=slurm", "launch.with_", Slurm()),
    ],
)
def test_a_setting_reaches_its_target(setting: str, path: str, value: Any) -> None:
    found: Any = load_text(BASE, settings=[setting]).job
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_a_setting_reaches_into_a_call_written_as_a_word_or_behind_a_param() -> None:
    text = BASE + "param rule = adam\nlaunch { with = slurm }\n"
    text = text.replace("sgd(rate, momentum = 0.9)", "rule") + "log { every = rate * 100 steps }"
    job = good(load_text(text, settings=[
        "launch.with.partition=gpu", "launch.with.time=2h", "train.optimizer.lr=0.5", "train.optimizer.eps=1e-6",
    ]))  # fmt: skip
    assert job.launch.with_ == Slurm(partition="gpu", time=7200.0)
    assert job.train.optimizer == Adam(lr=0.5, eps=1e-6)
    job = good(load_text(BASE, settings=["parallelism.gradients=powersgd", "parallelism.gradients.rank=3"]))
    assert repr(job.parallelism.gradients) == "PowerSGD(rank=3)"


def test_the_last_setting_of_a_name_wins() -> None:
    job = good(load_text(BASE, settings=["data.batch=1", "data.batch=2", "train.steps=3", "train.epochs=4"]))
    assert (job.data.batch, job.train.steps, job.train.epochs) == (2, None, 4)


@pytest.mark.parametrize("text", ["corpus.txt", "a b.txt", "10%.txt", "x=y.txt", '"quoted.txt"', "plain", "../up/it"])
def test_text_that_is_no_expression_is_taken_literally(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asks = "param file\n" + BASE.replace('"corpus.txt"', "file")
    has = 'param file = "other"\n' + BASE.replace('"corpus.txt"', "file")
    want = os.path.normpath(tmp_path / text.strip('"'))
    for job in (
        good(load_text(asks, settings=[f"file={text}"])),
        good(load_text(has, settings=[f"file= {text} "])),
        good(load_text(BASE, settings=[f"data.source.file={text}"])),
    ):
        assert job.data.source == Text(file=want)


def test_a_param_that_is_a_number_takes_no_text() -> None:
    assert codes(load_text(BASE, settings=["rate=very fast"])) == ["E0017 <--set 1>:1:11"]
    assert codes(load_text(BASE, settings=["rate=fast"])) == ["E0120 <--set 1>:1:6"]


def test_mistakes_point_into_the_setting() -> None:
    loaded = load_text(BASE, settings=["data.batch=8", "rate=-1", "train.optimizer.beta=3", "dta.batch=1", "foo=1"])
    assert codes(loaded) == [
        "E0125 <--set 2>:1:6", "E0131 <--set 3>:1:1", "E0106 <--set 4>:1:1", "E0110 <--set 5>:1:1",
    ]  # fmt: skip
    first = next(iter(loaded.report)).span
    assert first is not None and first.source.text == "rate=-1"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.batch.size=3", "which has no arguments"),
        ("model.network.layers=3", "is a list, not a call with arguments"),
        ("memory.recompute.n=2", "is not set, so it has no argument to set"),
        ("train.optimizer.lr.x=2", "too many parts"),
        ("train.optimizer=3", "takes an optimizer"),
        ("train=3", "is a block and takes no value"),
        ("parallelism.auto=true", "no field `auto`"),
        ("wandb=true", "no param `wandb`"),
        ("expect.bubble=3%", "holds comparisons"),
        ("expect.bubble.most=3%", "holds comparisons"),
        ("expect.bubble.most.of.all=none", "holds comparisons"),
        ("expect.bubble<", "value is missing"),
        ("data.batch", "no `=`"),
        ("=3", "no name"),
        ("", "no `=`"),
    ],
)
def test_a_setting_that_fits_nothing(setting: str, message: str) -> None:
    (found,) = load_text(BASE, settings=[setting]).report
    assert message in found.message and str(found.span).startswith("<--set 1>:")


# --------------------------------------------------------------------------------------------------------- promises


def test_promises_of_a_later_layer_replace_those_of_the_same_name(tmp_path: Path) -> None:
    path = files(
        tmp_path, base=BASE + "expect { bubble < 3%, bubble > 1%, devices == 2 }",
        job='import "base.plt"\nexpect { bubble < 5%, bubble >= 2% }',
    )  # fmt: skip

    def promised(*settings: str) -> set[tuple[str, str, float]]:
        return {(p.name, p.operator, p.value) for p in good(load(path, settings)).expect}

    assert promised() == {("bubble", "<", 0.05), ("bubble", ">=", 0.02), ("devices", "==", 2)}
    assert promised("expect.bubble=none") == {("devices", "==", 2)}
    assert promised("expect.bubble<=1%", "expect.devices=none") == {("bubble", "<=", 0.01)}
    assert promised("expect.mfu>0.4") == {*promised(), ("mfu", ">", 0.4)}
    assert promised("expect . peak_memory == 2GiB") == {*promised(), ("peak_memory", "==", 2 << 30)}


def test_a_promise_given_as_a_setting_points_into_it() -> None:
    assert codes(load_text(BASE, settings=["expect.bubble<3GiB"])) == ["E0122 <--set 1>:1:15"]
    assert codes(load_text(BASE, settings=["expect.bubbel<3%"])) == ["E0140 <--set 1>:1:8"]


# ----------------------------------------------------------------------------------------------------------- sweeps

SWEEP = BASE + "sweep {\n  train.optimizer.lr = [1e-3, rate]\n  data.batch = [8, 2 * 8]\n}\n"


def test_a_sweep_gives_its_combinations_as_settings() -> None:
    loaded = load_text(SWEEP)
    job = good(loaded)
    assert loaded.combinations == (
        (("train.optimizer.lr", "1e-3"), ("data.batch", "8")),
        (("train.optimizer.lr", "1e-3"), ("data.batch", "2 * 8")),
        (("train.optimizer.lr", "rate"), ("data.batch", "8")),
        (("train.optimizer.lr", "rate"), ("data.batch", "2 * 8")),
    )
    assert job.sweep == {"train.optimizer.lr": ("1e-3", "rate"), "data.batch": ("8", "2 * 8")}
    assert job.train.optimizer == SGD(lr=1e-3, momentum=0.9), "the job is the first combination"
    last = load_text(SWEEP, settings=[f"{path}={text}" for path, text in loaded.combinations[-1]])
    assert good(last).data.batch == 16 and good(last).train.optimizer == SGD(lr=0.1, momentum=0.9)
    assert not last.combinations


def test_a_setting_on_a_swept_path_drops_that_sweep() -> None:
    loaded = load_text(SWEEP, settings=["data.batch=4"])
    assert good(loaded).data.batch == 4
    assert loaded.combinations == ((("train.optimizer.lr", "1e-3"),), (("train.optimizer.lr", "rate"),))
    assert load_text(SWEEP, settings=["sweep.data.batch=none"]).combinations == loaded.combinations
    assert len(load_text(SWEEP, settings=["sweep.train.seed=[1, 2, 3]"]).combinations) == 12


def test_a_sweep_may_be_of_a_param_of_a_required_field_and_of_a_file(tmp_path: Path) -> None:
    text = BASE.replace("optimizer = sgd(rate, momentum = 0.9)", "seed = 1") + (
        'sweep { rate = [1, 2], train.optimizer = [sgd(rate), adam], data.source.file = ["a.txt", "b.txt"] }'
    )
    loaded = load_text(text, folder=str(tmp_path))
    job = good(loaded)
    assert job.train.optimizer == SGD(lr=1.0) and len(loaded.combinations) == 8
    assert job.sweep["data.source.file"] == (f'"{tmp_path}/a.txt"', f'"{tmp_path}/b.txt"'), "from anywhere the same"


def test_a_sweep_keeps_the_text_in_quotes_and_leaves_comments_out() -> None:
    loggers = '[\n  wandb(  # "here"\n    name = "a  # b",\n    project = "x"),\n  wandb(name = "a # b")]'
    loaded = load_text(f"{BASE}sweep {{ log.loggers = {loggers} }}")
    assert good(loaded).sweep["log.loggers"] == ('wandb( name = "a  # b", project = "x")', 'wandb(name = "a # b")')
    for ((path, text),) in loaded.combinations:
        good(load_text(BASE, settings=[f"{path}={text}"]))


def test_a_path_in_a_swept_call_is_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files(tmp_path, jobs__job=BASE + 'sweep { data.source = [text("a.txt"), text( "~/b.txt", context = 8)] }')
    monkeypatch.setenv("HOME", "/home-of-mine")
    for folder, first in ((tmp_path, f'text("{tmp_path}/jobs/a.txt")'), (tmp_path / "jobs", 'text("a.txt")')):
        monkeypatch.chdir(folder)
        loaded, (one, other) = load_each(path)
        assert good(loaded).sweep["data.source"] == (first, 'text( "~/b.txt", context = 8)')
        assert good(one).data.source == Text(file=f"{tmp_path}/jobs/a.txt")
        assert good(other).data.source == Text(file="/home-of-mine/b.txt", context=8)


def test_an_alternative_that_is_given_twice_is_a_mistake() -> None:
    loaded = load_text(BASE + "sweep { data.workers = [0, 1,\n 0], train.optimizer = [sgd(1), sgd(1.0)] }")
    assert codes(loaded) == ["E0142 job.plt:6:2"]
    (error,) = loaded.report.errors
    assert "`data.workers` has the alternative `0` twice" in error.message
    assert [fix.title for fix in error.fixes] == ["remove `0`"]


@pytest.mark.parametrize(
    ("folder", "sweep", "shared"),
    [
        ('"kept"', "train.seed = [0, 1]", "`train.seed`"),
        ('"kept"', "train.seed = [0]", ""),
        ("where", 'where = ["a", "b"]', ""),
        ("none", 'checkpoint.dir = ["a", "b"]', ""),
        ("none", 'checkpoint.dir = ["a", "b"], train.seed = [0, 1], data.batch = [4, 8]', "`train.seed`, `data.batch`"),
        ('"kept"', "checkpoint.every = [none, 1 epoch, 2 epochs]", "`checkpoint.every`"),
        ('"kept"', "checkpoint.every = [none, 1 epoch]", ""),
    ],
)
def test_the_runs_of_a_sweep_share_no_folder_of_checkpoints(folder: str, sweep: str, shared: str) -> None:
    text = f'param where = "x"\n{BASE}checkpoint {{ every = 2 epochs, dir = {folder} }}\nsweep {{ {sweep} }}'
    errors = load_text(text).report.errors
    assert [error.message.partition(" over ")[2].partition(" would ")[0] for error in errors] == [shared] * bool(shared)
    assert not shared or (errors[0].code == "E0145" and errors[0].message.rpartition("/")[2] in ("kept", "a"))


def test_every_alternative_is_checked() -> None:
    sweep = "train.optimizer.lr = [1e-3, -1, 2GiB], train.optimizer.monentum = [1, 2], data.batch = [0, 1]"
    found = codes(load_text(f"{BASE}sweep {{ {sweep} }}"))
    assert found == ["E0125 job.plt:5:37", "E0122 job.plt:5:41", "E0131 job.plt:5:48", "E0125 job.plt:5:97"]


def test_a_sweep_has_an_end() -> None:
    lists = ", ".join(f"train.{name} = {list(range(1, 30))}" for name in ("seed", "clip", "epochs"))
    loaded = load_text(f"{BASE}sweep {{ {lists} }}")
    assert codes(loaded) == ["E0037 job.plt:5:9"] and not loaded.combinations


def test_a_field_has_an_effect_if_it_has_one_in_some_combination() -> None:
    text = BASE + "parallelism { schedule = gpipe }\nsweep { parallelism.pipeline = [1, 2] }"
    assert not load_text(text).report
    assert codes(load_text(text, settings=["parallelism.pipeline=1"])) == ["W0103 job.plt:5:15"]


# -------------------------------------------------------------------------------------------------- paths, origins


def test_paths_start_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", "/home-of-mine")
    path = files(
        tmp_path, jobs__base=BASE + 'param kept = "kept.bin"\nmodel { weights = "w/../init.bin" }',
        job='import "jobs/base.plt"\ncheckpoint { every = 1 epoch, dir = "out", resume = kept }',
    )  # fmt: skip
    job = good(load(path))
    assert job.data.source == Text(file=f"{tmp_path}/jobs/corpus.txt")
    assert job.model.weights == f"{tmp_path}/jobs/init.bin"
    assert job.checkpoint.resume == f"{tmp_path}/jobs/kept.bin", "a param's text starts where the param was written"
    assert job.checkpoint.dir == str(here / "out"), "what is written starts in the current folder"
    assert good(load(path, ["model.weights=x.bin"])).model.weights == str(here / "x.bin")
    assert good(load(path, ["model.weights=~/x.bin"])).model.weights == "/home-of-mine/x.bin"
    assert good(load(path, ["checkpoint.resume=auto"])).checkpoint.resume == "auto"


def test_origins_say_who_set_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path, base=BASE, job='import "base.plt"\n\ndata { workers = 2 }\nexpect { devices == 1 }')
    loaded = load("job.plt", ["train.optimizer.lr=0.2", "data.batch=4"])
    expected = {
        "rate": "base.plt:1", "data.workers": "job.plt:3", "data.batch": "<--set 2>", "data.shuffle": "default",
        "train.optimizer": "base.plt:4", "train.optimizer.lr": "<--set 1>", "train.optimizer.momentum": "base.plt:4",
        "expect.devices": "job.plt:4", "launch.with": "default",
    }  # fmt: skip
    assert {path: loaded.origins.get(path) for path in expected} == expected
    place = good(loaded).train.optimizer.places["lr"]
    assert (str(place.name), place.value.text(), place.origin) == ("<--set 1>:1:1", "0.2", "<--set 1>")
