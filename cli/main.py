"""The `dslc` command. Each subcommand is a module of `dslc.commands`, imported only when it is used."""

from __future__ import annotations

import sys

from dslc.terminal.argument_types import byte_count, count, node_and_gpu_counts
from dslc.terminal.exit_codes import GOOD, WRONG_USAGE, CommandFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

EXAMPLE = """example:
  dslc new digits            a job to start from, digits.plt
  dslc check digits.plt      every mistake at once, in a quarter of a second, without a GPU
  dslc plan digits.plt       what every rank will do
  dslc run digits.plt        trains

exit status: 0 good, 1 the job file is at fault, 2 wrong usage, 3 the training failed
"""

PLAN_HELP = "a .plt file; or a plan.json, beside its job, which `dslc plan JOB --json` or a run has made"
SET_HELP = "override a param, a block.field or a block.field.argument; may be repeated"


def build_parser(alone: str = "") -> argparse.ArgumentParser:
    """Returns the parser of the command line; `--help` of each command is its only documentation.

    Where `alone` is a command, only that one is made, which saves 7 ms of a start.
    """
    import argparse

    parser = argparse.ArgumentParser(
        prog="dslc",
        description="A compiler for distributed PyTorch training.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in [alone] if alone in _COMMANDS else _COMMANDS:
        help, example, add_arguments = _COMMANDS[name]
        made = commands.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(made)
    return parser


def _job_arguments(
    made: argparse.ArgumentParser, help: str = "a .plt file", *, many: bool = False, one: bool = True
) -> None:
    made.add_argument("jobs" if many else "job", metavar="JOB", nargs="+" if many else None if one else "?", help=help)
    made.add_argument("--set", dest="settings", metavar="PATH=VALUE", action="append", default=[], help=SET_HELP)


def _trace_argument(made: argparse.ArgumentParser) -> None:
    made.add_argument("--trace", action="store_true", help="call `python(…)` functions, and check their results")


def _checkpoint_argument(made: argparse.ArgumentParser) -> None:
    wanted = "a checkpoint, a folder of them, a run, a .safetensors file, or `best` (default: the newest)"
    made.add_argument("--checkpoint", metavar="PATH", help=wanted)
    made.add_argument("--raw", action="store_true", help="take the weights themselves, not their average (`train.ema`)")


def _run(made: argparse.ArgumentParser) -> None:
    _job_arguments(made, PLAN_HELP)
    made.add_argument("--out", metavar="DIR", help="the run directory (default: runs/<job>/<time>)")
    made.add_argument(
        "--rendezvous",
        metavar="HOST[:PORT]",
        help="of a job on several nodes: the one where they meet; the same command runs on each. HOST1,HOST2 for an "
        "elastic job: a node that comes later tries each",
    )
    made.add_argument(
        "--parallel",
        metavar="N",
        type=count,
        default=1,
        help="of a sweep: train so many combinations at once, each on cores or GPUs of its own",
    )
    made.add_argument(
        "--profile",
        action="store_const",
        const="profile",
        default="",
        help="measure memory and collectives of some steps, beside the predictions",
    )
    # An option of its own: an optional value would take the job that follows.
    made.add_argument(
        "--profile=trace",
        dest="profile",
        action="store_const",
        const="trace",
        help="record some steps of all ranks in RUN/trace.json.gz, for ui.perfetto.dev, below the predicted step",
    )
    made.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="take three steps, evaluate, save, resume and take one more, and leave nothing",
    )


def _check(made: argparse.ArgumentParser) -> None:
    _job_arguments(made, many=True)
    output = made.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a list of objects, for machines")
    output.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif", "junit"),
        default="text",
        help="print annotations of GitHub, a SARIF log or JUnit's XML, for CI (default: text)",
    )
    _trace_argument(made)
    made.add_argument(
        "--fix", action="store_true", help="correct spelling and syntax as the helps say, and check again"
    )
    made.add_argument(
        "--unsafe-fixes",
        action="store_true",
        help="as --fix, and set other values that the helps name, such as another batch or width",
    )
    made.add_argument("--resume", metavar="DIR", help="also check that the job can resume from the checkpoint in DIR")
    made.add_argument("--locked", action="store_true", help="also check that the plan is the one in the job's .lock")


def _plan(made: argparse.ArgumentParser) -> None:
    _job_arguments(made, PLAN_HELP)
    made.add_argument("--json", action="store_true", help="print the plan itself, as JSON: keep it beside the job")
    made.add_argument("--summary", action="store_true", help="print what the text shows as JSON, for machines")
    made.add_argument("--rank", metavar="N", type=int, help="show what one rank will do")
    made.add_argument("--after", metavar="PASS", help="print the plan graph after this pass of the compiler")
    made.add_argument(
        "--why", action="store_true", help="of a job with `auto`: compare the chosen plan with its runners-up"
    )
    made.add_argument("--lock", action="store_true", help="write the plan's hash and its causes to the job's .lock")
    made.add_argument(
        "--chakra",
        metavar="FOLDER",
        help="write the plan as Chakra execution traces, one for each rank, for simulators",
    )
    made.add_argument("--origins", action="store_true", help="show which file or --set gave each value")
    _trace_argument(made)


def _data(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    made.add_argument("--json", action="store_true", help="print an object, for machines")
    made.add_argument(
        "--samples",
        metavar="N",
        type=lambda text: count(text, 10**15),
        default=100_000,
        help="read at most this many samples of each split, spread evenly (default: 100000)",
    )


def _pair_arguments(made: argparse.ArgumentParser, kind: str = "", default: str = "") -> None:
    last = f"a job at a git revision, REV:PATH,{kind}" if kind else "or a job at a git revision, REV:PATH"
    kinds = f"a job, a plan file, a run directory, {last}"
    made.add_argument("first", metavar="A", help=kinds)
    made.add_argument("second", metavar="B", nargs="?", help=f"another (default: A, as `--set` says{default})")
    made.add_argument(
        "--set", dest="settings", metavar="PATH=VALUE", action="append", default=[], help=f"{SET_HELP}; in B"
    )


def _diff(made: argparse.ArgumentParser) -> None:
    _pair_arguments(made)
    output = made.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print an object, for machines")
    output.add_argument("--markdown", action="store_true", help="print tables in Markdown, for a pull request")
    _trace_argument(made)


def _bisect(made: argparse.ArgumentParser) -> None:
    _pair_arguments(made, " or a recording", ", or in one process")
    made.add_argument("--steps", metavar="N", type=int, default=3, help="number of steps (default: 3)")
    begin = "start both from a checkpoint (default: of two run directories, the last before their losses part)"
    made.add_argument("--from", dest="checkpoint", metavar="CHECKPOINT", help=begin)
    made.add_argument("--record", metavar="FILE", help="write a recording of A, to compare on another machine")
    made.add_argument("--json", action="store_true", help="print an object, for machines")


def _render(made: argparse.ArgumentParser) -> None:
    made.add_argument("job", metavar="JOB", help=f"{PLAN_HELP}; or a run directory")
    made.add_argument("second", metavar="B", nargs="?", help="a second plan, compared with the first in a page")
    set_help = f"{SET_HELP}; of two plans in B"
    made.add_argument("--set", dest="settings", metavar="PATH=VALUE", action="append", default=[], help=set_help)
    page_help = ".svg, .png, .dot; .html is a page of all views, with what a run has measured or a second plan"
    made.add_argument("-o", "--output", metavar="FILE", required=True, help=page_help)
    made.add_argument(
        "--view",
        choices=("placement", "graph", "schedule"),
        default="placement",
        help="the view to draw (default: placement)",
    )
    _trace_argument(made)


def _verify(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    made.add_argument("--steps", metavar="N", type=int, default=5, help="number of steps (default: 5)")
    made.add_argument(
        "--shrink", action="store_true", help="train a narrow copy of a library network, which fits a laptop"
    )
    made.add_argument(
        "--noise", action="store_true", help="keep dropout on that ranks draw apart; compares less exactly"
    )
    made.add_argument("--out", metavar="DIR", help="keep the run directories of the trainings here")


def _calibrate(made: argparse.ArgumentParser) -> None:
    _job_arguments(
        made, "a .plt file (default: small jobs, from whose steps the constants of this machine follow)", one=False
    )
    made.add_argument(
        "--from", dest="runs", metavar="RUN", nargs="+", help="fit the constants to these run directories"
    )
    help = "the catalogue to write, a .toml file (default: your own, which jobs without `devices.catalogue` use)"
    made.add_argument("-o", "--output", metavar="FILE", help=help)
    made.add_argument(
        "--rendezvous", metavar="HOST[:PORT]", help="of a job on several hosts: where they meet, as for `run`"
    )


def _choose(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    made.add_argument("--json", action="store_true", help="print an object with all plans, for machines")
    made.add_argument("-o", "--output", metavar="FILE", help="write the job with the chosen plan, a .plt file")
    made.add_argument("--picture", metavar="FILE", help="draw time and memory of all plans: .svg, .png, .dot or .html")
    made.add_argument(
        "--devices", metavar="A..B", help="the chosen plan of A, 2A, 4A, … up to B devices, in time and in device hours"
    )
    _trace_argument(made)


def _evaluate(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    _checkpoint_argument(made)
    made.add_argument(
        "--split",
        choices=("validation", "test"),
        help="the samples to evaluate on (default: validation)",
    )
    tasks = "in place of a split, tasks of the evaluation harness with its options: 'hellaswag,piqa --num_fewshot 5'"
    made.add_argument("--lm-eval", metavar="TASKS", help=tasks)
    made.add_argument("--json", action="store_true", help="print an object, for machines")


def _predict(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    _checkpoint_argument(made)
    made.add_argument(
        "-o", "--output", metavar="FILE", required=True, help=".npz or .safetensors: output (or output.NAME), index"
    )
    made.add_argument(
        "--split",
        choices=("validation", "train", "test", "all"),
        default="validation",
        help="the samples to predict (default: validation)",
    )


def _export(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    _checkpoint_argument(made)
    made.add_argument(
        "-o", "--output", metavar="PATH", required=True, help=".safetensors, .pt, or a folder for `from_pretrained`"
    )
    made.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=byte_count,
        help="the most bytes of a file in the folder (default: 50GB)",
    )
    made.add_argument("--adapter", action="store_true", help="the adapter alone, into a folder for peft")


def _fmt(made: argparse.ArgumentParser) -> None:
    made.add_argument("jobs", metavar="JOB", nargs="+", help="a .plt file, or - for standard input")
    made.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file would change")


def _explain(made: argparse.ArgumentParser) -> None:
    made.add_argument("code", metavar="CODE", nargs="?", help="as in error[E0301]; without one, a list of all")


def _new(made: argparse.ArgumentParser) -> None:
    made.add_argument("name", metavar="NAME", nargs="?", help="the job's name: NAME.plt is written")
    kinds = ("digits", "gpt", "python", "finetune", "lora", "chat", "dpo")
    made.add_argument("--template", choices=kinds, default="digits", help="the kind of job")
    made.add_argument("--list", action="store_true", help="list the templates and examples with what each shows")


def _tokens(made: argparse.ArgumentParser) -> None:
    made.add_argument("texts", metavar="FILE", nargs="+", help="text, in the order given")
    made.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    made.add_argument("--tokenizer", metavar="JSON", help="a tokenizer.json of `tokenizers` (default: bytes)")


def _submit(made: argparse.ArgumentParser) -> None:
    _job_arguments(made)
    made.add_argument("--out", metavar="DIR", help="the run directory (default: runs/<job>/<time>)")
    made.add_argument("--dry-run", action="store_true", help="print what would be handed over, and leave nothing")


def _status(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", metavar="RUN", help="a run directory, or a folder of some: of a job, or of a sweep")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="keep it up to date until the run ends")
    how.add_argument("--json", action="store_true", help="print a list of objects, for machines")


def _ui(made: argparse.ArgumentParser) -> None:
    made.add_argument("runs", metavar="RUNS", help="a folder of runs: of a job, of a sweep, or one run directory")
    made.add_argument(
        "--port", metavar="N", type=lambda text: count(text, 65535), default=0, help="the port (default: a free one)"
    )


def _why(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", metavar="RUN", help="a run directory, also of another machine")
    made.add_argument("--json", action="store_true", help="print an object with all positions, for machines")


def _stop(made: argparse.ArgumentParser) -> None:
    made.add_argument("run", metavar="RUN", help="a run directory, or a folder of some, all of which end")
    made.add_argument("--no-wait", action="store_true", help="ask the run to end, and do not wait for it")


def _convert(made: argparse.ArgumentParser) -> None:
    _config_arguments(made, "the files of one training, such as a DeepSpeed JSON and arguments for its `auto`")
    made.add_argument("-o", "--output", metavar="FILE", help="write the job there, a .plt file (default: print it)")
    made.add_argument(
        "--prove",
        action="store_true",
        help="train some steps with the other tool and with the job, from the same weights; print both curves",
    )
    made.add_argument("--model", metavar="JOB", help="with --prove: take network and data from this job")
    made.add_argument(
        "--python", metavar="PATH", help="with --prove: the interpreter that has the other tool (default: this one)"
    )
    made.add_argument("--steps", metavar="N", type=int, help="with --prove: steps (default: 12)")


def _lint(made: argparse.ArgumentParser) -> None:
    _config_arguments(made, "configurations, each by itself")
    made.add_argument(
        "--model", metavar="JOB", help="also show the memory of a rank, with the network and data of this job"
    )
    made.add_argument(
        "--format", choices=("text", "github"), default="text", help="github: as annotations of a workflow"
    )


def _config_arguments(made: argparse.ArgumentParser, help: str) -> None:
    made.add_argument("files", metavar="FILE", nargs="+", help=help)
    made.add_argument(
        "--from", dest="tool", choices=_TOOLS, help="the tool of the files (default: recognised by their keys)"
    )
    made.add_argument(
        "--devices",
        metavar="[NODES x]GPUS",
        type=node_and_gpu_counts,
        help="the devices, where no file states them: 8, or 2x8 for two nodes",
    )


def _lsp(made: argparse.ArgumentParser) -> None:
    made.add_argument("--stdio", action="store_true", help="for editors that pass it: the default, and the only way")


def _schema(made: argparse.ArgumentParser) -> None:
    forms = made.add_mutually_exclusive_group()
    forms.add_argument("--markdown", action="store_true", help="print the reference page")
    forms.add_argument("--textmate", action="store_true", help="print the grammar by which editors colour jobs")


# Of dslc.conversion.recognize.TOOLS, which only two commands load.
_TOOLS = ("deepspeed", "transformers", "accelerate", "axolotl", "lightning", "torchtitan")


def _doctor(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="print a list of objects, for machines")


def _completion(made: argparse.ArgumentParser) -> None:
    made.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    made.set_defaults(build_parser=build_parser)  # the scripts are made of all commands


# Of each command: its help, an example, and the function that adds its arguments.
_COMMANDS = {
    "run": (
        "compile, launch and train",
        "dslc run digits.plt --set train.epochs=2 --out runs/first\n  dslc run digits.plt --profile=trace",
        _run,
    ),
    "check": ("find every reason to reject a job; start nothing", "dslc check *.plt --json", _check),
    "plan": (
        "show what every rank will do",
        "dslc plan cluster.plt --rank 5\n  dslc plan cluster.plt --chakra traces",
        _plan,
    ),
    "data": (
        "show the lengths, padding, copies and classes of a job's data, and what training and validation share",
        "dslc data digits.plt --samples 1000",
        _data,
    ),
    "diff": (
        "show what differs between two plans; exit status 0: nothing, 1: something, 2: a plan cannot be made",
        "dslc diff main:cluster.plt cluster.plt --markdown",
        _diff,
    ),
    "render": (
        "draw the plan as a picture, or as a page with its run or a second plan",
        "dslc render runs/digits/2026-11-28_09-30-00 -o run.html",
        _render,
    ),
    "verify": (
        "train some steps under the plan, in one process and in a plain loop of torch, and compare",
        "dslc verify gpt_cpu.plt --set parallelism.zero=3",
        _verify,
    ),
    "bisect": (
        "train two plans from the same weights; name the first tensor that differs by more than rounding explains",
        "dslc bisect gpt.plt --set parallelism.tensor=2",
        _bisect,
    ),
    "calibrate": (
        "measure the parts of a job's step on this machine, from which plans predict the time of a step",
        "dslc calibrate gpt_cpu.plt -o here.toml",
        _calibrate,
    ),
    "choose": (
        "search the plans of a job: show those that no other beats in both time and memory, and the one for `auto`",
        "dslc choose gpt.plt --set memory.limit=40GiB -o chosen.plt",
        _choose,
    ),
    "evaluate": (
        "compute the metrics of a checkpoint over the whole validation split",
        "dslc evaluate digits.plt --json",
        _evaluate,
    ),
    "predict": ("write a checkpoint's output for every sample", "dslc predict digits.plt -o digits.npz", _predict),
    "export": (
        "write the whole weights of a checkpoint for plain torch, or for `transformers`",
        "dslc export gpt.plt -o gpt.safetensors",
        _export,
    ),
    "fmt": ("format jobs in the canonical layout", "dslc fmt --check jobs/*.plt", _fmt),
    "explain": ("print the long form of a diagnostic", "dslc explain E0301", _explain),
    "new": ("write a job to start from", "dslc new mnist --template gpt", _new),
    "tokens": ("make a memory-mapped file of tokens from text", "dslc tokens books/*.txt -o books.bin", _tokens),
    "submit": (
        "hand a job to SLURM or Kubernetes, after all that `run` would refuse",
        "dslc submit cluster.plt --set launch.with.time=2h --dry-run",
        _submit,
    ),
    "status": ("show where a run stands, or each run of a folder", "dslc status runs/digits --follow", _status),
    "ui": (
        "show the runs of a folder in a browser tab, as they train: what differs in their jobs, and their curves",
        "dslc ui runs/digits",
        _ui,
    ),
    "why": (
        "show why a run stalls or has ended: the rank that is behind, its module and line, and the ranks that wait",
        "dslc why runs/digits/2026-11-23_20-15-00",
        _why,
    ),
    "stop": (
        "end a run after its step, with a checkpoint, from any machine that sees its folder",
        "dslc stop runs/digits/2026-11-23_20-15-00",
        _stop,
    ),
    "convert": (
        "make a job of configurations of DeepSpeed, Accelerate, Lightning and others; list the outcome of every key",
        "dslc convert ds_config.json --devices 8 -o job.plt    # --prove trains with both, and prints both curves",
        _convert,
    ),
    "lint": (
        "find ignored and contradictory keys in configurations of DeepSpeed, Accelerate and others; write no job",
        "dslc lint ds_config.json --format github",
        _lint,
    ),
    "lsp": (
        "serve editors by the language server protocol, on standard input and output",
        "dslc lsp    # an editor starts it: docs/editor.md has the settings of VS Code, Neovim and Helix",
        _lsp,
    ),
    "doctor": (
        "show what this machine has, what is missing for which feature, and the command that installs it",
        "dslc doctor",
        _doctor,
    ),
    "completion": (
        "print a script by which a shell completes commands, options and files",
        "dslc completion bash > ~/.local/share/bash-completion/completions/dslc",
        _completion,
    ),
    "schema": (
        "print the language as JSON schema, as the reference page, or as a TextMate grammar",
        "dslc schema --markdown",
        _schema,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    command = ""
    try:
        # Ctrl-C is handled from here on; that is why little is imported above.
        import atexit
        import gc
        import importlib

        from dslc.runtime.process import screen

        screen.prepare()
        gc.set_threshold(50_000)  # reading a job makes many objects and few cycles; ranks are processes of their own
        atexit.register(gc.freeze)  # else Python looks for cycles in all modules as it ends: 20 ms of each command
        chosen = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
        if chosen is None:
            return WRONG_USAGE
        command = chosen.command or ""
        if chosen.version:
            from dslc.terminal.version import __version__

            print(f"dslc {__version__}")
            return GOOD
        if not command:
            build_parser().print_help()
            return WRONG_USAGE
        status: int = importlib.import_module(f"dslc.commands.{command}").main(chosen)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except CommandFailedError as failure:
        if str(failure):
            from dslc.dsl.plain import plain_lines

            _say(plain_lines(f"dslc: {failure}"))
        return failure.status
    except BrokenPipeError:  # `dslc plan … | head`
        screen.drop(sys.stdout)
        screen.drop(sys.stderr)
        return GOOD
    except OSError as error:
        from dslc.terminal.system_errors import report_system_error

        return report_system_error(error, command, _say)


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace | None:
    """Parses the command line; returns None for an unknown command or option, which is reported."""
    from dslc.terminal import usage

    parser = build_parser(words[0] if words else "")
    if usage.mistake(parser, words):
        _say(f"dslc: {usage.mistake(build_parser(), words)}")
        return None
    chosen, over = parser.parse_known_args(words)
    if len(over) == 1 and "second" in chosen and chosen.second is None:
        # For argparse, an optional word is absent if an option stands before it: `render A -o FILE B`.
        chosen.second = over.pop()
    if over:
        _say(f"dslc: {usage.too_many(chosen.command, 'settings' in chosen, over)}")
        return None
    return chosen


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # only the exit status is left
        from dslc.runtime.process import screen

        screen.drop(sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
