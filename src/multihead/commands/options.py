"""What the commands that train have in common: their options, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from multihead.commands.refusing import refuse
from multihead.errors import bad_value
from multihead.training.loop import Diverged
from multihead.training.parallel import UnequalProcesses, leave
from multihead.training.plan import Start
from multihead.training.progress import INTERRUPTED
from multihead.training.session import CannotCompile

WHOLE, MODEL, STEPS, MACHINE = "Run", "Model", "Training", "Machine"  # panels of --help


class Dtype(str, Enum):
    """What products may be computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Parallel(str, Enum):
    """How processes share a model's training."""

    ddp = "ddp"
    fsdp = "fsdp"


def default_device() -> str:
    """CUDA where there is some, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def given_options(context: typer.Context) -> set[str]:
    """The names of the options that were written, and not left to their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    # By name: the enumeration is click's, or typer's own copy.
    return {name.removesuffix("_") for name, source in sources.items() if source and source.name == "COMMANDLINE"}


Width = Annotated[
    int, typer.Option(help="How many numbers stand for a token; a multiple of 2 * heads.", rich_help_panel=MODEL)
]
Heads = Annotated[int, typer.Option(help="How many heads each attention has.", rich_help_panel=MODEL)]
Steps = Annotated[int, typer.Option(help="How many steps to train, in all.", rich_help_panel=STEPS)]
Accumulate = Annotated[
    int, typer.Option(help="In how many parts a step is done, one by one: less memory.", rich_help_panel=STEPS)
]
LearningRate = Annotated[
    float, typer.Option(help="The highest: it rises to it, then falls as a cosine.", rich_help_panel=STEPS)
]
WarmUp = Annotated[
    int | None, typer.Option(help="Steps until it is there. By default a twentieth.", rich_help_panel=STEPS)
]
WeightDecay = Annotated[float, typer.Option(help="AdamW's, of matrices and tables alone.", rich_help_panel=STEPS)]
Clip = Annotated[float, typer.Option(help="The longest a gradient may be; 0 for no bound.", rich_help_panel=STEPS)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.", rich_help_panel=WHOLE)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Begin anew in place of the run in --out.", rich_help_panel=WHOLE)
]
ValidateEvery = Annotated[int, typer.Option(help="Steps from one validation to the next.", rich_help_panel=WHOLE)]
SaveEvery = Annotated[int, typer.Option(help="Steps from one checkpoint to the next.", rich_help_panel=WHOLE)]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda ... By default cuda where there is one.", rich_help_panel=MACHINE)
]
DtypeOption = Annotated[
    Dtype, typer.Option(help="What products are computed in. float16: CUDA only.", rich_help_panel=MACHINE)
]
Threads = Annotated[
    int | None, typer.Option(help="How many cores to use. By default as torch chooses.", rich_help_panel=MACHINE)
]
Compile = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the model first.", rich_help_panel=MACHINE)
]
ParallelOption = Annotated[
    Parallel | None, typer.Option(help="Under torchrun: whole models (the default) or shards.", rich_help_panel=MACHINE)
]


def refuse_diverged(run: Path, error: Diverged) -> NoReturn:
    """Leave, as a run's model is of no use: whether it is only shows when it predicts."""
    told = bad_value("RUN", "a run that has learned something", f"{str(run)!r}, whose training diverged: {error}")
    refuse(f"{told} Train it with a smaller --learning-rate.")


def _out_of_memory(error: Exception) -> bool:
    """torch has a class of errors for this on GPUs alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def finish(start: Start, carry_out: Callable[[], int]) -> NoReturn:
    """Train what was prepared, and leave with its exit code, or with a line that says why it can't be done."""
    try:
        code = carry_out()
    except OSError as error:
        refuse(f"{start.folder}: can't be written to ({error.strerror or error}). What was saved last stands.")
    except CannotCompile as error:
        refuse(f"--compile: expected a model that can be compiled here, got: {error}. Add --resume --no-compile.")
    except UnequalProcesses as error:
        refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        instead = "Take a smaller --batch, a larger --accumulate or a smaller model."
        told = bad_value("--batch", "steps that fit into memory", "larger ones", "What was saved last stands.", instead)
        refuse(str(told))
    except KeyboardInterrupt:  # while the trained model is judged: it is saved
        code = INTERRUPTED
    raise typer.Exit(leave(start.processes, code))
