"""The software on the host: graph engine (``E1``), operator compiler (``E4``), profiling (``EK``), MindSpore, CANN."""

from __future__ import annotations

from tools.diagnosis import sources
from tools.diagnosis.entry import Entry

_SET_ENV = "source CANN's set_env.sh in the shell that starts the server (python tools/doctor.py prints its path)"

ENTRIES = (
    Entry(
        "E10001",
        "graph engine: a value is invalid",
        "an option or parameter of the graph has a wrong value; the message names it and the reason. A path such as "
        "ge.debugDir is often one without write permission",
        ("correct the parameter that the message names",),
        sources.GE_E10001,
    ),
    Entry(
        "E19999",
        "graph engine: inner error",
        "a graph could not be built, loaded or run; the lines below it name the operator",
        ("read the first line below it", "collect the plog before asking for support"),
        sources.MINDSPORE_CANN_CASES,
        follows=True,
    ),
    Entry(
        "E40020",
        "operator compiler: a Python module is missing",
        "CANN compiles operators in Python; a module it needs is not installed in the Python that runs, or PYTHONPATH "
        "lacks CANN's own",
        (_SET_ENV, "install what the message names (decorator, sympy, scipy, attrs, psutil, ...)"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "E40021",
        "operator compiler: an operator did not compile",
        "shapes or types the operator does not take, or a damaged operator package",
        ("read the Python trace in the plog", "install the operator package of the toolkit's version"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "E40024",
        "operator compiler: a Python function could not be called",
        "CANN's Python packages (te, tbe) are not those of this CANN",
        (_SET_ENV, "remove te and hccl wheels of an older CANN from the Python"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EH0010",
        "ACL: host memory could not be allocated",
        "the host, or its control group, is out of memory",
        ("free memory of the host; python tools/doctor.py shows the plan",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EK0201",
        "profiling: host memory could not be allocated",
        "the host, or its control group, is out of memory",
        ("switch profiling off, or free memory of the host",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "set_env_missing",
        "CANN's environment is not set",
        "CANN is not installed, or its set_env.sh was not sourced before the process started, so that its libraries "
        "and Python modules are not found",
        (_SET_ENV, "if CANN is not installed: install toolkit and operator package that pair with the driver"),
        sources.MINDSPORE_INSTALL,
        pattern=r"lib(hccl|ascendcl|acl_\w+|ge_\w+|graph\w*|runtime|tiling\w*|nnopbase|opapi|msprofiler|ascend_dump|"
        r"platform|register|error_manager)\.so: cannot open shared object|Cannot find the tbe operator implementation|"
        r"Cannot find opp path|No module named '(te|tbe|acl)'|MindSpore relies on whl package \"te\"",
    ),
    Entry(
        "ascend_not_supported_here",
        "MindSpore has no Ascend here",
        "MindSpore did not load its Ascend plugin: no CANN, CANN's set_env.sh not sourced, or no driver",
        (_SET_ENV, "python tools/doctor.py shows which part is missing"),
        sources.MINDSPORE_INSTALL,
        pattern=r"Unsupported device target Ascend|there is no Ascend here",
    ),
    Entry(
        "cann_mismatch",
        "CANN is not a version this MindSpore supports",
        "MindSpore compares CANN's version with the ones it was built for",
        ("install a CANN of the versions it names: python tools/doctor.py has the table",),
        sources.MINDFORMERS_VERSIONS,
        pattern=r"Ascend AI software package.{0,60}version \S+ does not match|"
        r"used for compiling the custom operator does not match",
    ),
    Entry(
        "host_out_of_memory",
        "the host ran out of memory",
        "the kernel ended a process, or refused memory to one",
        ("python tools/doctor.py compares the memory plan with the machine", "raise the container's memory limit"),
        "https://docs.kernel.org/admin-guide/mm/concepts.html",
        pattern=r"Out of memory: Kill(ed)? process|oom-kill|MemoryError|Cannot allocate memory|std::bad_alloc",
    ),
    Entry(
        "illegal_instruction",
        "the processor lacks an instruction that a library uses",
        "a library was built for a newer processor, or the virtual machine hides instructions",
        ("build the kernels on this machine: make clean setup", "show the host's processor to the virtual machine"),
        "https://man7.org/linux/man-pages/man7/signal.7.html",
        pattern=r"Illegal instruction|\(signal 4\)|SIGILL",
    ),
)
