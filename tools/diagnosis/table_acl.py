"""Return codes of ACL and the runtime: six digits, printed as ``error code is 507018`` or ``ret[207001]``."""

from __future__ import annotations

from tools.diagnosis import sources
from tools.diagnosis.entry import Entry

_SEE_ABOVE = "the E-code and the plog lines before it say more: python tools/doctor.py explain ~/ascend/log"


def _row(code: str, title: str, cause: str, *advice: str, follows: bool = False) -> Entry:
    return Entry(code, title, cause, advice or (_SEE_ABOVE,), sources.RUNTIME_CODES, follows)


ENTRIES = (
    _row("107000", "a parameter is invalid", "the runtime refused an argument"),
    _row(
        "107001",
        "the device id is invalid",
        "the machine, or ASCEND_RT_VISIBLE_DEVICES, has fewer devices",
        "check serving_config.start_device_id against npu-smi info -l",
    ),
    _row(
        "107002",
        "there is no context: no device was set in this thread",
        "setting the device failed earlier, or a thread or forked process uses the device without setting it",
        "look for the error before it; a device is never used across fork",
        follows=True,
    ),
    _row("107003", "the stream is of another context", "a stream of another device or thread was used"),
    _row("107019", "waiting timed out", "the device did not answer in time", follows=True),
    _row(
        "107020",
        "a task timed out",
        "the device did not finish in time; in a group of ranks mostly because another rank failed",
        follows=True,
    ),
    _row(
        "107022",
        "the task was aborted",
        "an earlier fault stopped everything on the device",
        "look for the first error of this device",
        follows=True,
    ),
    _row("200000", "memory could not be allocated", "host or device memory is exhausted"),
    _row(
        "207000",
        "the feature is not supported",
        "this chip, driver or CANN lacks it",
        "check that driver and CANN pair",
    ),
    _row(
        "207001",
        "device memory could not be allocated",
        "weights, KV cache, activations and other processes take more than the device has",
        "npu-smi info: end what is left of an earlier run",
        "lower pa_config.num_blocks or context.max_device_memory",
    ),
    _row(
        "207004",
        "the device is not available",
        "it does not run, or is held by another process",
        "npu-smi info: health, and who holds it",
    ),
    _row(
        "207006",
        "no permission",
        "the user may not use the device",
        "add the user to the group HwHiAiUser, or install the driver with --install-for-all",
    ),
    _row(
        "207018",
        "device memory is exhausted",
        "nothing is left of the device's memory",
        "lower pa_config.num_blocks or context.max_device_memory",
    ),
    _row("500002", "an error inside the graph engine (GE)", "a graph could not be built or run"),
    _row("507000", "an error inside the runtime", "the host side of the runtime failed"),
    _row("507001", "an error inside the task scheduler of the device", "the device's scheduler failed"),
    _row(
        "507008",
        "the chip's version could not be read",
        "driver and CANN do not pair, or the driver is not visible",
        "python tools/doctor.py: driver, CANN and their pairing",
    ),
    _row(
        "507010",
        "the task scheduler's heartbeat is lost",
        "the device hangs or was reset",
        "npu-smi info -t health -i N; restart the device",
    ),
    _row(
        "507011",
        "the model stream failed",
        "an operator of the graph failed, or its data did not come (GetNext)",
        "find the failed task before it: kernel_name, task_id, stream_id in the plog",
        follows=True,
    ),
    _row("507012", "the task scheduler did not answer", "the device is overloaded or hangs"),
    _row("507013", "a copy by DMA failed in hardware", "host or device address is wrong, or the hardware is faulty"),
    _row(
        "507014",
        "an AI Core task timed out",
        "a kernel hangs or runs too long",
        "find kernel_name in the plog",
    ),
    _row(
        "507015",
        "an AI Core task failed",
        "an address outside its tensors, a wrong shape or index, or faulty hardware",
        "find 'fault kernel_name' in the plog: that operator failed",
    ),
    _row("507016", "an AI Core trap", "a kernel stopped itself by an assertion", "find kernel_name in the plog"),
    _row("507017", "an AI CPU task timed out", "a kernel on the AI CPU hangs", follows=True),
    _row(
        "507018",
        "an AI CPU task failed",
        "a general code: a kernel on the AI CPU failed, data did not come, or the device ran out of memory",
        "read the device's log (device-N_*.log) of the same second before concluding anything",
    ),
    _row(
        "507033",
        "the device could not be started",
        "it is occupied, in a fault, out of memory, or driver and CANN do not pair",
        "npu-smi info: health, memory, processes",
        "python tools/doctor.py: driver, CANN and their pairing",
    ),
    _row("507034", "a vector core task timed out", "a kernel hangs, or waits for another rank", follows=True),
    _row(
        "507035",
        "a vector core task failed",
        "an address outside its tensors, a wrong shape or index, or faulty hardware",
        "find 'fault kernel_name' in the plog: that operator failed",
    ),
    _row(
        "507046",
        "waiting for a stream timed out",
        "something on the stream hangs; with several ranks mostly a collective that waits for another",
        follows=True,
    ),
    _row(
        "507048",
        "an inner task timed out",
        "with several ranks: a collective waited for another rank (EI0002)",
        follows=True,
    ),
    _row(
        "507053",
        "the device's memory reported an error",
        "a memory cell of the device is faulty, or an address was wrong",
        "npu-smi info -t ecc -i N; if it counts errors, reset the device and report it",
    ),
    _row(
        "507054",
        "the device's memory has an uncorrectable error (HBM, several bits)",
        "faulty hardware",
        "npu-smi info -t ecc -i N; reset the device, and have it replaced if it comes back",
    ),
    _row("507899", "an error inside the driver", "mostly the consequence of an earlier failure", follows=True),
    _row(
        "507901",
        "the connection between host and device is cut",
        "the device process ended or the device was reset",
        "look for what ended it: an earlier error of this device",
        follows=True,
    ),
    Entry(
        "161001",
        "aclnn: a null pointer among the parameters",
        "an operator was called without a tensor it needs",
        (_SEE_ABOVE,),
        sources.ACLNN_CODES,
    ),
    Entry(
        "161002",
        "aclnn: a parameter is invalid",
        "type, shape or format of a tensor is not one the operator takes",
        ("the EZ1001 line beside it names parameter and reason",),
        sources.ACLNN_CODES,
    ),
    Entry(
        "361001",
        "aclnn: a call of the runtime failed",
        "the device or its memory failed under the operator",
        (_SEE_ABOVE,),
        sources.ACLNN_CODES,
        follows=True,
    ),
    Entry(
        "561002",
        "aclnn: tiling failed",
        "the operator found no way to split these shapes over the cores",
        ("check the shapes; rule out an operator package of another CANN version",),
        sources.ACLNN_CODES,
    ),
    Entry(
        "561003",
        "aclnn: no kernel was found",
        "the operator package is not installed, or is of another chip or version",
        ("install Ascend-cann-*-ops (formerly -kernels) of the toolkit's version and the chip's name",),
        sources.ACLNN_CODES,
    ),
    Entry(
        "561103",
        "aclnn: a null pointer inside an operator",
        "an inner step of the operator failed",
        ("the EZ9999 line beside it says where", _SEE_ABOVE),
        sources.ACLNN_CODES,
    ),
)
