"""Devices and axes: the number of ranks, and the place of each in the mesh.

Ranks are numbered so that heavy traffic stays on fast links: tensor is the innermost axis, then context, then data, and
pipeline is the outermost. rank = ((p * data + d) * context + c) * tensor + t, and node = rank // processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from dslc.compiler.facts.calibration import Calibration, RunFit
from dslc.compiler.facts.catalogue import read_catalogue
from dslc.compiler.facts.hardware import CATALOGUE, Hardware
from dslc.compiler.facts.user_calibrations import machine_differences, with_user_calibration
from dslc.compiler.ir.facts import MachineFacts
from dslc.compiler.placement.axes import AXES, coordinates, crosses_nodes
from dslc.compiler.placement.schedules import default_microbatches, default_virtual_stages
from dslc.dsl.bounds import DEVICES
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, judge
from dslc.dsl.language.blocks import DevicesSpec, ParallelismSpec
from dslc.dsl.language.calls import Free
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call, Range
from dslc.dsl.language.suggest import nearest_choice
from dslc.dsl.record import Record, record
from dslc.dsl.remedy import Fix, either_field, remedy, remove_field, set_field
from dslc.dsl.words import plural

# What carries the collectives of jobs that do not say.
CPU_BACKEND = "gloo"
GPU_BACKENDS = "cpu:gloo,cuda:nccl"


@record
class Layout(Record):
    """The resolved topology. `processes` is of one node; `sizes` is by axis, in the order of `AXES`."""

    nodes: int
    node_counts: tuple[int, ...]  # every admissible count of an elastic job; else one
    processes: int
    device: str  # cpu or cuda
    gpus: tuple[int, ...]  # the GPU of each local rank; () if only a count was asked for
    hardware: Hardware
    backend: str
    sizes: dict[str, int]
    sequence: bool  # a tensor axis also cuts the sequence between its layers, where the network allows it
    microbatches: int
    virtual_stages: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def passes(self) -> int:
        """Number of forward and backward passes of a step, over all stages."""
        return 2 * self.sizes["pipeline"] * self.virtual_stages * self.microbatches

    def work(self, layers: int) -> int:
        """Estimates the work of computing the cost of a network of `layers` layers, in layers of about 0.2 ms. The work
        is twice as much if axes cut them, and 8 passes of a pipeline's schedule take as long as a layer.
        """
        cut = self.sizes["tensor"] * self.sizes["context"] > 1
        return layers * (2 if cut else 1) + (self.passes // 8 if self.sizes["pipeline"] > 1 else 0)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's place on each axis."""
        return coordinates(self.sizes, rank)

    def stride(self, axis: str) -> int:
        """Returns the difference in rank between two neighbours on an axis."""
        inner = AXES[AXES.index(axis) + 1 :]
        product = 1
        for name in inner:
            product *= self.sizes[name]
        return product

    def crosses_nodes(self, axis: str) -> bool:
        """True if some neighbours on the axis are on different nodes."""
        return crosses_nodes(self.sizes[axis], self.stride(axis), self.nodes, self.processes)

    def is_hierarchical(self, ranks: int, stride: int) -> bool:
        """True if a group of ranks, each `stride` after the one before, has several on each of several nodes, which
        share memory.
        """
        on_node = self.processes // max(1, stride)
        return self.backend == "shared_memory" and 1 < on_node < ranks and ranks % on_node == 0

    def ranks(self, pipeline: int) -> range:
        """Returns the ranks of one pipeline coordinate, which are consecutive."""
        stride = self.stride("pipeline")
        return range(pipeline * stride, (pipeline + 1) * stride)


def lay_out(job: JobSpec, machine: MachineFacts | None = None) -> Findings[Layout | None]:
    """Returns devices, axes and micro-batches of the job; None if it yields an error, or if the devices are unknown.

    `machine` is given if the job is about to run: it gives the number of GPUs for `all`, and checks that those asked
    for exist.
    """
    devices = job.devices
    counts = (
        tuple(range(devices.nodes.first, devices.nodes.last + 1))
        if isinstance(devices.nodes, Range)
        else (devices.nodes,)
    )
    device = "cuda" if devices.gpus is not None else "cpu"
    (gpus, processes, hardware), sound = yield from judge(_devices(devices, counts[-1], machine))
    if processes is None or not sound:
        return None
    sizes = yield from _axes(job, counts[-1], processes)
    if sizes is None:
        return None
    virtual, microbatches = _micro_batches(job.parallelism)
    if machine is not None and machine.gpus and device == "cuda":
        # The GPUs of this machine override the catalogue's figures.
        hardware = replace(hardware, memory=min(machine.gpus[n] for n in gpus or range(processes)))
    return Layout(
        nodes=counts[-1],
        node_counts=counts,
        processes=processes,
        device=device,
        gpus=gpus,
        hardware=hardware,
        backend=devices.backend or (CPU_BACKEND if device == "cpu" else GPU_BACKENDS),
        sizes=sizes,
        sequence=_has_pieces(job.parallelism, device),
        microbatches=microbatches,
        virtual_stages=virtual,
    )


def _has_pieces(parallelism: ParallelismSpec, device: str) -> bool:
    """True if a tensor axis cuts the sequence too. That saves memory for as many bytes; on CPUs two collectives through
    the host's memory in place of one take longer than the norms that they save, so there it is not the default.
    """
    return device == "cuda" if parallelism.sequence is None else parallelism.sequence


def _devices(
    devices: DevicesSpec, nodes: int, machine: MachineFacts | None
) -> Findings[tuple[tuple[int, ...], int | None, Hardware]]:
    """Returns the named GPUs, the processes of one node and their hardware, with the user's own calibration of it."""
    gpus, processes = yield from _processes(devices, machine)
    hardware = yield from _hardware(devices)
    if devices.catalogue is None and processes is not None:
        hardware = yield from with_user_calibration(hardware, processes)
    elif (times := hardware.calibration or hardware.fit) is not None and (hardware.cpu or machine is not None):
        yield from _warn_of_other_machine(devices, times)
    yield from _check_backend(devices)
    if processes is not None:
        yield from _check_count(devices, nodes * processes)
    return gpus, processes, hardware


def _check_count(devices: DevicesSpec, world: int) -> Iterator[Diagnostic]:
    if world <= DEVICES.most:
        return
    field = "nodes" if devices.is_set("nodes") else "gpus" if devices.gpus is not None else "cpus"
    yield Diagnostic(
        DEVICES.code,
        f"the job asks for {world:,} devices",
        devices.value_span(field),
        help=f"{DEVICES.most:,} are the most that dslc plans",
    )


def _processes(devices: DevicesSpec, machine: MachineFacts | None) -> Findings[tuple[tuple[int, ...], int | None]]:
    """Returns the named GPUs, and the processes of one node; None if only the machine can tell (`gpus = all`)."""
    yield from _check_gpus(devices)
    named, count = _requested_devices(devices)
    if devices.gpus is None or machine is None:
        return named, count
    if machine.fault:
        help = "`nvidia-smi` by hand shows what is wrong"
        yield Diagnostic("E0824", machine.fault, devices.value_span("gpus"), help=help)
        return named, None
    gpu_count = len(machine.gpus)
    needed = max(named) + 1 if named else max(1, count or 1)
    if needed > gpu_count:
        free = isinstance(devices.gpus, Free)
        request_text = f"GPU {needed - 1}" if named else plural(needed, "free GPU" if free else "GPU")
        used = f": {machine.gpus_in_use} of its GPUs are in use" if machine.gpus_in_use else ""
        yield Diagnostic(
            "E0420",
            f"the job asks for {request_text}, and this machine has {gpu_count}{used}",
            devices.value_span("gpus"),
            help=remedy(set_field("devices.gpus", gpu_count, f"at most {gpu_count}"))
            if gpu_count
            else "wait for one, or name some"
            if used
            else "`cpus = 2` runs anywhere",
        )
        return named, None
    return named, gpu_count if count is None else count


def warn_of_unknown_count(devices: DevicesSpec, machine: MachineFacts | None) -> Iterator[Diagnostic]:
    """Warns that only the machine that runs the job can tell its devices."""
    if machine is None and devices.gpus is not None and _requested_devices(devices)[1] is None:
        yield Diagnostic(
            "W0404",
            "the number of GPUs is known only where the job runs: nothing that depends on it is checked",
            devices.value_span("gpus"),
            help="a count, or a list",
        )


def _check_gpus(devices: DevicesSpec) -> Iterator[Diagnostic]:
    (named, count), span = _requested_devices(devices), devices.value_span("gpus")
    twice = min((gpu for gpu, uses in Counter(named).items() if uses > 1), default=None)
    if twice is not None:
        once = remedy(set_field("devices.gpus", f"[{', '.join(map(str, dict.fromkeys(named)))}]", "name each GPU once"))
        yield Diagnostic("E0405", f"GPU {twice} is named twice", span, help=once)
    if any(gpu < 0 for gpu in named):
        all_gpus = remedy(set_field("devices.gpus", "all"), " takes every GPU")
        yield Diagnostic("E0406", "a GPU has a number below zero", span, help=all_gpus)
    if count is not None and count < 1 and isinstance(devices.gpus, int | str):
        none = Fix((remove_field("devices.gpus"), set_field("devices.cpus", 1)), "`cpus = 1`")
        help = remedy("a count of 1 or more, or ", set_field("devices.gpus", "all", "`all`"), "; ", none, " for none")
        yield Diagnostic("E0406", f"`devices.gpus` is {count}", span, help=help)


def _requested_devices(devices: DevicesSpec) -> tuple[tuple[int, ...], int | None]:
    """Returns the named GPUs, and the processes asked for; None for all."""
    gpus = devices.gpus
    if gpus is None:
        return (), devices.cpus or 1
    if isinstance(gpus, str) and gpus != "all":
        numbers = tuple(int(part) for part in gpus.split(","))
        # "3" is a count and "-1" all, as "1, 3" is a list: Lightning's rules, which users know.
        gpus = numbers[0] if len(numbers) == 1 else numbers
    if isinstance(gpus, Call):
        return (), gpus.count if isinstance(gpus, Free) else None
    if isinstance(gpus, tuple):
        return gpus, len(gpus)
    if gpus in ("all", -1):
        return (), None
    assert isinstance(gpus, int)
    return (), gpus


def _hardware(devices: DevicesSpec) -> Findings[Hardware]:
    kind = devices.kind or ("cpu" if devices.gpus is None else "gpu")
    catalogue = yield from read_catalogue(devices.catalogue, devices.value_span("catalogue"))
    hardware = catalogue.get(kind)
    if hardware is None:
        sizes = [name for name in catalogue if name.startswith(f"{kind.lower()}_")]  # `a100` has two
        likely = sizes or [name for name in (nearest_choice(kind, catalogue),) if name]
        yield Diagnostic(
            "E0407",
            f"`{kind}` is not in the hardware catalogue",
            devices.value_span("kind"),
            help=remedy("did you mean ", either_field("devices.kind", likely, "`{}`"), "?")
            if likely
            else f"one of {', '.join(catalogue)}",
        )
        return CATALOGUE["cpu"]
    if catalogue is not CATALOGUE and hardware is CATALOGUE.get(kind):
        yield Diagnostic(
            "W0423",
            f"`devices.catalogue` has no entry for `{kind}`, the kind of device that the job runs on",
            devices.value_span("catalogue"),
            help=f"a table `[{kind}]` in it, or the `kind` that it is about",
        )
    if hardware.cpu != (devices.gpus is None):
        yield from _report_other_device(devices, hardware)
    return hardware


def _warn_of_other_machine(devices: DevicesSpec, calibration: Calibration | RunFit) -> Iterator[Diagnostic]:
    """Warns of times that were measured on another machine; they are used, as the job says."""
    differences = list(machine_differences(calibration))
    if differences:
        yield Diagnostic(
            "W0880",
            f"the times in `devices.catalogue` were measured on another machine: it has {differences[0]}",
            devices.value_span("catalogue"),
            notes=tuple(Note(f"it has {difference}") for difference in differences[1:]),
            help="`dslc calibrate JOB` measures this one, for jobs without `devices.catalogue`",
        )


def _report_other_device(devices: DevicesSpec, hardware: Hardware) -> Iterator[Diagnostic]:
    kind, requested, other_device = hardware.kind, "cpu", "gpu"
    if devices.gpus is not None:
        requested, other_device = other_device, requested
    advice = f"add `gpus = …` for {kind}"
    if devices.is_set(f"{requested}s"):
        advice = remedy(remove_field("devices.kind"), ", or ask for the other")
    if kind not in CATALOGUE:
        advice = f'`device = "{requested}"` in its table of the catalogue, or `{other_device}s = …` here'
    yield Diagnostic(
        "E0408",
        f"`devices.kind` is `{kind}`, a kind of {other_device.upper()}, but the job asks for {requested.upper()}s",
        devices.value_span("kind"),
        notes=(Note(f"`devices.{requested}s` is set here", devices.name_span(f"{requested}s")),),
        help=advice,
    )


def _check_backend(devices: DevicesSpec) -> Iterator[Diagnostic]:
    if devices.backend == "nccl" and devices.gpus is None:
        yield Diagnostic(
            "E0409",
            "nccl works between GPUs only, and this job runs on CPUs",
            devices.value_span("backend"),
            help=remedy(remove_field("devices.backend"), ": gloo is taken on CPUs"),
        )
    if devices.backend == "shared_memory" and devices.gpus is not None:
        yield Diagnostic(
            "E0409",
            "`shared_memory` carries the collectives of CPUs, and this job runs on GPUs",
            devices.value_span("backend"),
            help=remedy(remove_field("devices.backend"), ": NCCL is taken on GPUs, which uses shared memory by itself"),
        )


def _axes(job: JobSpec, nodes: int, processes: int) -> Findings[dict[str, int] | None]:
    """Returns the size of each axis; their product must be the number of devices."""
    parallelism = job.parallelism
    world = nodes * processes
    other_ranks = parallelism.pipeline * parallelism.tensor * parallelism.context
    data = parallelism.data if parallelism.data is not None else max(1, world // other_ranks)
    sizes = {
        "pipeline": parallelism.pipeline,
        "data": data,
        "context": parallelism.context,
        "tensor": parallelism.tensor,
    }
    if data * other_ranks == world:
        return sizes
    written_axes = [axis for axis in ("data", *[a for a in AXES if a != "data"]) if parallelism.is_set(axis)]
    axes_text = " x ".join(f"{axis} {sizes[axis]}" for axis in written_axes) or "data 1"
    product = data * other_ranks if parallelism.data is not None else other_ranks
    blamed = written_axes[0] if written_axes else "data"
    field = "gpus" if job.devices.gpus is not None else "cpus"
    unit = field.removesuffix("s").upper()
    devices_text = plural(processes, unit) if nodes == 1 else f"{plural(nodes, 'node')} of {plural(processes, unit)}"
    if parallelism.data is not None:
        says = f"the axes make {plural(product, 'rank')} ({axes_text}), but the job has {plural(world, 'device')}"
        fitting = world // other_ranks if world % other_ranks == 0 else 0
        advice: str = _devices_for(product, nodes, field)
        if fitting:
            out = remove_field("parallelism.data", "leave it out")
            advice = remedy(set_field("parallelism.data", fitting), ", or ", out)
    else:
        says = f"{plural(world, 'device')} cannot be shared out over {axes_text}"
        more = _devices_for(other_ranks * max(1, -(-world // other_ranks)), nodes, field)
        advice = remedy(f"axes whose product divides {world}; or ", more)
    yield Diagnostic(
        "E0401",
        says,
        parallelism.value_span(blamed),
        label=f"{axes_text} = {product}" if len(written_axes) > 1 else "",
        notes=(
            Note(
                f"the job asks for {devices_text} here",
                job.devices.value_span(field if job.devices.is_set(field) else "nodes"),
            ),
        ),
        help=advice,
    )
    return None


def _devices_for(world: int, nodes: int, field: str) -> str:
    if world % nodes == 0:
        path = f"devices.{field}"
        return remedy(set_field(path, world // nodes, f"`{path} = {world // nodes}`"), " would fit")
    return f"{plural(world, 'device')} would fit: change `devices.nodes` or an axis"


def _micro_batches(parallelism: ParallelismSpec) -> tuple[int, int]:
    """Returns the virtual stages per rank, and the micro-batches."""
    if parallelism.pipeline == 1:
        return 1, parallelism.microbatches or 1
    virtual = parallelism.virtual_stages or default_virtual_stages(parallelism.schedule)
    microbatches = parallelism.microbatches or default_microbatches(parallelism.schedule, parallelism.pipeline, virtual)
    return virtual, microbatches
