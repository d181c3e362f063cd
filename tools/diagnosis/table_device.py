"""The device: its driver (``EL``), the runtime (``EE``, 107xxx to 507xxx), AI Core and AI CPU."""

from __future__ import annotations

from tools.diagnosis import sources
from tools.diagnosis.entry import Entry

_FREE_THE_DEVICE = "see who holds the device: npu-smi info; end what is left of an earlier run"
_LESS_MEMORY = "lower pa_config.num_blocks, scheduler_config.max_num_batched_tokens or context.max_device_memory"
_FIND_KERNEL = (
    "find 'fault kernel_name' in the lines below it or in the plog: that operator failed; run its shapes alone",
    "set ASCEND_LAUNCH_BLOCKING=1 so that the failing operator is the one reported",
    "if other operators fail on this device alone, suspect the hardware: npu-smi info -t health -i N",
)

ENTRIES = (
    Entry(
        "EL0001",
        "driver: the device is absent or abnormal",
        "there is no such device, the driver is not loaded, or the device is in a fault",
        ("npu-smi info", "in a container pass /dev/davinciN, /dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EL0002",
        "driver: the device id is out of range",
        "the machine, or ASCEND_RT_VISIBLE_DEVICES, has fewer devices",
        ("check serving_config.start_device_id against npu-smi info -l",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EL0003",
        "driver: an argument is invalid",
        "the driver refused a call of the runtime: a wrong device, a freed address, or a CANN newer than the driver",
        ("check device id and the lines below it", "check that driver and CANN pair: python tools/doctor.py"),
        sources.DRIVER_ERRORS,
    ),
    Entry(
        "EL0004",
        "driver: memory could not be allocated",
        "device memory (or pinned host memory) is exhausted; the message names the module that asked",
        (_FREE_THE_DEVICE, _LESS_MEMORY),
        sources.hiascend_error("0267"),
    ),
    Entry(
        "EL0005",
        "driver: the resource is busy",
        "the device is occupied, being reset, or not ready yet",
        (_FREE_THE_DEVICE, "wait and try again"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EL0006",
        "driver: resources are insufficient",
        "too many processes, streams or events on the device",
        (_FREE_THE_DEVICE,),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EL0007",
        "driver: no permission",
        "the user may not use the device, or another container holds it",
        ("add the user to the group HwHiAiUser, or install the driver with --install-for-all", _FREE_THE_DEVICE),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EL0015",
        "driver: the device may not be used from here",
        "it is bound to another container",
        ("stop the other container, or take another device",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EE1001",
        "runtime: an argument is invalid",
        "often a device id that does not exist, or a call without a device; the reason stands behind it. As last "
        "line of a trace (rtGetDevMsg, context pointer null) it only follows an earlier failure",
        ("read the reason; check serving_config.start_device_id against npu-smi info -l",),
        sources.hiascend_error("0180"),
        follows=True,
    ),
    Entry(
        "EE1002",
        "runtime: waiting for a stream timed out",
        "the device did not finish in time: a hanging operator, or a collective waiting for another rank",
        ("look for an earlier error of another rank", "raise the limit only if the step is really that long"),
        sources.ERROR_CODE_JSON,
        follows=True,
    ),
    Entry(
        "EE1013",
        "runtime: host memory could not be allocated",
        "the host, or its control group, is out of memory",
        ("free memory of the host; python tools/doctor.py shows the plan",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EE1015",
        "runtime: the driver is too old for this CANN",
        "CANN uses a function that the installed driver does not have",
        ("upgrade driver and firmware (Ascend HDK) to a version that pairs: python tools/doctor.py has the table",),
        sources.ERROR_CODE_JSON,
        pattern=r"driver version capability is insufficient",
    ),
    Entry(
        "EE9999",
        "runtime: inner error",
        "the runtime met an error without a code of its own; out of memory (halMemAlloc failed, drvRetCode=6) and "
        "failed tasks (Task execute failed) are the common ones",
        ("read the first line below it: it names the call, the device and its return code",),
        sources.MINDSPORE_CANN_CASES,
        follows=True,
    ),
    Entry(
        "EH0001",
        "ACL: a value is invalid",
        "an ACL call got a wrong argument; the message names parameter, value and reason",
        ("check the value that the message names; a path is often one without write permission",),
        sources.hiascend_error("0234", "zh/canncommercial/latest"),
    ),
    Entry(
        "EH0002",
        "ACL: an argument is null",
        "an ACL call got a null pointer, mostly because an earlier call failed",
        ("look for the error before it",),
        sources.ERROR_CODE_JSON,
        follows=True,
    ),
    Entry(
        "EZ9999",
        "operator: inner error (an AI Core error, if the text says aicore or aivec)",
        "a kernel failed on the device: an address outside its tensors, a wrong shape or index, or faulty hardware",
        _FIND_KERNEL,
        sources.AICORE_ERROR,
    ),
    Entry(
        "EZ1001",
        "operator: a parameter is not supported",
        "an aclnn operator was called with a shape, type or attribute it does not take; the message says which",
        ("compare with the operator's page, and check that CANN's operator package is the toolkit's version",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EZ3002",
        "operator: not supported by the operator library",
        "type, format or shape of the operator has no kernel for this chip",
        ("check that the operator package for this chip is installed", "take another model_dtype"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EZ3003",
        "operator: no kernel was found",
        "the operator package (ops, formerly kernels) is not installed, or is of another chip or version",
        ("install Ascend-cann-*-ops of the toolkit's version and the chip's name",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "E39999",
        "AI CPU: inner error",
        "an AI CPU kernel failed or hangs; the lines below name it",
        ("read 'fault kernel_name' below it", "GetNext there means that data did not come: look at the feeding side"),
        sources.MINDSPORE_CANN_CASES,
    ),
    Entry(
        "E30005",
        "AI CPU: the device cannot be reached",
        "its heartbeat is missing, or the channel to it is cut",
        ("restart the device: npu-smi set -t reset -i N", "if it comes back: collect host and device logs"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "E30006",
        "AI CPU: the operator package could not be verified",
        "the AI CPU package on the host is not the right one, or the device has a memory error (ECC)",
        ("install CANN's operator package anew", "check ECC: npu-smi info -t ecc -i N"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "aicore_error",
        "a kernel failed on an AI Core",
        "an address outside its tensors, a wrong shape or index, or faulty hardware",
        _FIND_KERNEL,
        sources.AICORE_ERROR,
        pattern=r"(?i)there is an? (exception of )?(fftsplus )?(aivec|aicore|aivector) error|"
        r"Aicore kernel execute failed|\[(aicore|vector core) exception\]",
    ),
    Entry(
        "aicpu_error",
        "a kernel failed on the AI CPU",
        "wrong data, an access out of bounds, or a hanging thread of the AI CPU",
        ("read 'fault kernel_name' in the line", "rule out that the device ran out of memory"),
        sources.MINDSPORE_CANN_CASES,
        pattern=r"Aicpu kernel execute failed",
    ),
    Entry(
        "device_out_of_memory",
        "device memory is exhausted",
        "weights, KV cache, activations and other processes take more than the device has",
        (_FREE_THE_DEVICE, _LESS_MEMORY, "python tools/doctor.py --config CONFIG compares the plan with the device"),
        sources.MINDSPORE_CANN_CASES,
        pattern=r"NPU out of memory|halMemAlloc failed|driver error:out of memory|"
        r"memory isn't enough and alloc failed|Memory not enough:|rtMalloc fail|The device memory is not enough",
    ),
    Entry(
        "device_is_occupied",
        "the device is occupied by another process",
        "another process, or another container, holds the device or its memory; MindSpore wants more than half of "
        "the memory free when it starts",
        (_FREE_THE_DEVICE, "in containers: one container a device; -8005 and -8020 of npu-smi mean the same"),
        sources.DEVICE_USED,
        pattern=r"may be other processes occupying this card|[Dd]evice (\S+ )?is (being )?occupied|"
        r"because the device is used|dcmi mod(el|ule) initialize[d]? failed|"
        r"Free memory size is less than half of total memory size",
    ),
    Entry(
        "driver_not_found",
        "the NPU driver is not installed, or not visible here",
        "libascend_hal.so and its like come with the driver, not with CANN",
        (
            "install driver and firmware (Ascend HDK), or in a container mount /usr/local/Ascend/driver",
            "put /usr/local/Ascend/driver/lib64 and its subfolders driver and common into LD_LIBRARY_PATH",
        ),
        "https://github.com/vllm-project/vllm-ascend/issues/1440",
        pattern=r"lib(ascend_hal|c_sec|drv\w*|dcmi)\.so: cannot open shared object|Cannot find driver so",
    ),
)
