"""Plans and proves the job that the command line names, and emits the program and the place of its last rank."""

import sys

from dslc.compiler.compile import compile_plan
from dslc.compiler.emit import place
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect

report = Report()
analysis = inspect(load(sys.argv[1], []), report)
assert analysis is not None, report.errors
compiled = compile_plan(analysis)
program = compiled.program()
assert place(compiled.graph, program.world_size - 1).rank == program.world_size - 1
