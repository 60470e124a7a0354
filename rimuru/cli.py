"""The command `rimuru`: arguments in, exit code out (0 done, 2 bad input, 1 anything else; never a traceback)."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rimuru import __version__
from rimuru.base.errors import BadInputError, RimuruError
from rimuru.base.log import LEVELS, setup_logging
from rimuru.base.screen import brief
from rimuru.formats.names import find_model

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    if sys.stdin is None:  # closed by the caller (`<&-`)
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None or sys.stderr is None:
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        setup_logging(args.log_level)
        if getattr(args, "model", None) == "":  # a path would take it for the current folder
            raise BadInputError("the model's name is empty")
        if hasattr(args, "model") and args.command not in ("simulate.simulate", "inspect.inspect"):  # they plan more
            args.model = str(find_model(args.model))
        module, function = args.command.rsplit(".", 1)
        code = int(getattr(importlib.import_module(f"rimuru.commands.{module}"), function)(args))
        sys.stdout.flush()  # here, where it can still be told that the output went nowhere
        return code
    except RimuruError as error:
        print(f"rimuru: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rimuru: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:  # a full disk under stdout, a file that may not be read
        _drop_output()
        named = f": {error.filename}" if error.filename else ""
        print(f"rimuru: {error.strerror or one_line(error)}{named}; check the files and the output", file=sys.stderr)
        return 2
    except MemoryError:
        print("rimuru: out of memory; give a smaller --memory", file=sys.stderr)
        return 1
    except Exception as error:
        log.debug("the error's origin", exc_info=True)
        print(f"rimuru: internal error: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Keep the exit from flushing what cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose refusals are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rimuru: {' '.join(message.split())}; see `{self.prog} --help`\n")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def number_list(text: str) -> list[int]:
    """Comma-separated positive whole numbers."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, got {text!r}")
    return numbers


def one_line(error: BaseException) -> str:
    """Its message for a terminal: whatever a damaged file put into it, it stays short and harmless."""
    return brief(str(error))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="rimuru", description="Serves MoE models from GGUF files.")
    parser.add_argument("--version", action="version", version=f"rimuru {__version__}")
    parser.set_defaults(command=None, log_level="warning")
    commands = parser.add_subparsers(metavar="COMMAND")
    common, output = common_options(), output_options()
    _add_run(commands, [common, output])
    _add_serve(commands, [common_options(), output_options("info")])
    _add_convert(commands, [output])
    _add_inspect(commands, [common, output])
    _add_perplexity(commands, [common, output])
    _add_bench(commands, [common, output])
    _add_profile(commands, [common, output])
    _add_simulate(commands, [common, output])
    return parser


def output_options(log_level: str = "warning") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary on stderr")
    parser.add_argument("--log-level", default=log_level, choices=LEVELS)
    return parser


def common_options() -> argparse.ArgumentParser:
    """Options that every command which loads a model takes."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("machine and memory")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    group.add_argument("--memory", metavar="SIZE", help="everything on the device (CPU: in RAM), e.g. 8GiB")
    group.add_argument("--ram", metavar="SIZE", help="pinned host memory for experts (CUDA)")
    group.add_argument("--swap", metavar="SIZE", help="host memory for requests that give way to others")
    group.add_argument("--threads", type=int, metavar="N")
    group.add_argument(
        "--ctx", type=int, metavar="N", help="context length in tokens; default: the file's, as far as it fits"
    )
    group.add_argument("--kv-type", default="auto", choices=("auto", "f16", "bf16", "f32"))
    group.add_argument("--deterministic", action="store_true", help="results independent of the batch on CUDA too")
    group.add_argument("--policy", default="auto", choices=("auto", "static", "fixed", "paper", "cost"))
    group.add_argument("--residency", default="auto", choices=("auto", "hotset", "recency"))
    group.add_argument("--resident-experts", metavar="N|SHARE", help="fixed number or share (0.5) of resident experts")
    group.add_argument("--expert-offload-limit", type=int, metavar="N", help="most experts that may be non-resident")
    for name, what in (
        ("prefetch", "loading buffers, through which experts come that find no place in the pool (CUDA)"),
        ("fill-on-read", "keeping experts that were read"),
        ("in-place", "reading experts where they lie in host memory (CUDA); they come in turns where buffers are few"),
    ):
        group.add_argument(f"--no-{name}", dest=name.replace("-", "_"), action="store_false", help=f"turn off {what}")
    group.add_argument(
        "--prediction", action=argparse.BooleanOptionalAction,
        help="bring experts before a router has chosen them (CUDA; default: no, but in `simulate`)",
    )  # fmt: skip
    group.add_argument(
        "--cpu-experts", action=argparse.BooleanOptionalAction, default=False,
        help="let the CPU compute a share of the missed experts, found by timing steps, none where that loses (CUDA)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="S")
    return parser


def _add_run(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", parents=parents, help="answer a prompt, or chat")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a GGUF (any part of a split set, or its folder), a .rimuru folder, demo, or a name in ~/models",
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--token-ids", metavar="IDS", help="a prompt of token ids; the answer is printed as ids")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    parser.add_argument("-n", dest="n_tokens", type=int, default=256, metavar="N", help="most tokens of answer")
    parser.add_argument("--temp", type=float, default=0.8, metavar="T")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="A")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="A")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.set_defaults(command="run.run")


def _add_serve(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", parents=parents, help="answer over HTTP, as OpenAI's API does")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only; 0.0.0.0 = the network")
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="0 = any free port")
    parser.add_argument("--api-key", action="append", metavar="K", help="clients must send it; may be given again")
    parser.add_argument("--api-key-file", action="append", metavar="FILE", help="keys, one a line; hidden from `ps`")
    parser.add_argument(
        "--admin-key-file", action="append", metavar="FILE", help="keys of those who may resize the memory too"
    )
    parser.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="web pages that may use the API")
    parser.add_argument(
        "--allowed-host", action="append", metavar="NAME",
        help="on loopback: a further name by which the server may be called, as behind a proxy; may be given again",
    )  # fmt: skip
    parser.add_argument("--model-name", metavar="NAME", help="what /v1/models says; requests may name any model")
    parser.add_argument("--max-sequences", type=int, metavar="N", help="answers that run at once at most")
    parser.add_argument("--max-waiting", type=int, default=512, metavar="N", help="answers that may wait at most")
    parser.add_argument("--max-body", default="32MiB", metavar="SIZE", help="largest request")
    parser.add_argument("--request-timeout", type=float, metavar="SECONDS", help="longest time for a request")
    parser.add_argument("--queue-timeout", type=float, metavar="SECONDS", help="longest time in the queue")
    parser.add_argument(
        "--max-priority", type=int, default=0, metavar="N", help="highest priority that a request may ask for"
    )
    parser.set_defaults(command="serve.serve")


def _add_convert(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("convert", parents=parents, help="write page-aligned expert blobs")
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("-o", "--output", metavar="DIR", help="default: MODEL.rimuru beside the model")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare")
    parser.set_defaults(command="convert.convert")


def _add_inspect(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", parents=parents, help="what a model is, what fits, and how fast it will be")
    parser.add_argument("model", metavar="MODEL", help="a file, or a published model such as qwen3-30b-a3b")
    parser.add_argument("--quant", default="q4_k_m", metavar="Q", help="quantisation of a published model")
    _add_card(parser, None, "plan for rtx5090, rtx4090 or h200; default: the card that is here, measured")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command="inspect.inspect")


def _add_card(parser: argparse.ArgumentParser, default: str | None, what: str) -> None:
    """Options that say what a card can do."""
    parser.add_argument("--card", default=default, metavar="NAME", help=what)
    for name, rate in (
        ("compute-tflops", "matrix products"),
        ("memory-gbps", "device memory"),
        ("pcie-gbps", "host to device"),
        ("disk-gbps", "disk, for experts that --ram does not hold"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="G", help=f"rate of the card: {rate}")


def _add_perplexity(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("perplexity", parents=parents, help="how well a model predicts a text")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-f", "--file", metavar="TEXT", help="UTF-8 text; demo: default is what ships with it")
    parser.add_argument("--window", type=int, metavar="N", help="tokens per window (default 512)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command="perplexity.perplexity")


def _add_bench(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", parents=parents, help="prefill and decode rates")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--prefill", type=number_list, default=[512], metavar="N,N")
    parser.add_argument("--streams", type=number_list, default=[1, 8], metavar="N,N")
    parser.add_argument("--new", type=positive, default=128, metavar="N", help="tokens to decode per stream")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument(
        "--routing",
        default="model",
        metavar="model|synthetic|FILE",
        help="which experts are used: the model's own choice, that of a router with published statistics, or one "
        "recorded by `rimuru profile --record` (default: model)",
    )
    parser.add_argument("--router", default="auto", metavar="NAME", help="parameters of the synthetic router")
    parser.add_argument("--topics", type=positive, metavar="N", help="streams share N topics; default: one each")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command="bench.bench")


def _add_profile(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("profile", parents=parents, help="measure which experts a text uses")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-f", "--file", required=True, metavar="TEXT")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: beside the model, where it is found again")
    parser.add_argument("--record", metavar="FILE", help="also write every choice, for `bench --routing FILE`")
    parser.set_defaults(command="profile.profile")


def _add_simulate(commands: argparse._SubParsersAction, parents: list[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("simulate", parents=parents, help="serve a trace on a machine that is not there")
    parser.add_argument("model", metavar="SHAPE|MODEL", help="a built-in shape such as qwen3-30b-a3b, or a file")
    parser.add_argument(
        "--trace", required=True, metavar="FILE",
        help="lengths and arrival times, e.g. a CSV with the columns prompt_tokens,output_tokens",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of the trace")
    parser.add_argument("--stretch", type=float, default=1.0, metavar="X", help="multiply arrival times")
    parser.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals per second for a trace without times")
    parser.add_argument("--quant", default="q4_k_m", metavar="Q", help="quantisation of a built-in shape")
    parser.add_argument("--admission", default="optimistic", choices=("optimistic", "reserve"))
    _add_card(parser, "rtx5090", "rtx5090 (the default), rtx4090 or h200")
    parser.add_argument("--scratch", default="0", metavar="SIZE", help="activations within --memory (default 0)")
    parser.add_argument("--buffer-experts", type=int, default=0, metavar="N", help="loading buffers in the pool")
    parser.add_argument("--max-step-tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--max-sequences", type=int, default=256, metavar="N")
    parser.add_argument("--router", default="auto", metavar="NAME", help="parameters of the synthetic router")
    parser.add_argument("--topics", type=int, metavar="N", help="requests share N topics; default: one each")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of pages and requests over time")
    parser.add_argument("--no-timeline", action="store_true", help="leave the pages over time out of the JSON")
    parser.add_argument("--audit", action="store_true", help="check all invariants while it runs")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command="simulate.simulate")


if __name__ == "__main__":
    raise SystemExit(main())
