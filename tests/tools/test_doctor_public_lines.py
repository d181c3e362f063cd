"""Tests the doctor on log lines that were published: their errors, ranks and times.

The lines are shortened. Each case names the public thread from which its line comes.
"""

from datetime import datetime
from typing import NamedTuple

import pytest

from tools.diagnosis.log_reader import LogFile

VLLM_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"
FACTORY = "https://github.com/hiyouga/LlamaFactory/issues"
MINDSPORE = "https://www.mindspore.cn/tutorials/en/r2.10.0/debug/error_analysis/cann_error_cases.html"


class Case(NamedTuple):
    source: str
    lines: str
    codes: list[str]
    rank: int | None = None
    device: int | None = None
    pid: int | None = None
    time: str | None = None


CASES = [
    Case(
        f"{VLLM_ASCEND}/486",
        "[rank1]: RuntimeError: InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function error: "
        "HcclAllreduce, error code is 6\n"
        "[rank1]: [ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.\n"
        "[rank1]: EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank "
        "did not send the data in time. Please check the reason for the rank being stuck\n",
        ["EI0006"],
        rank=1,
        device=1,
        pid=1292363,
        time="2025-04-08T18:07:20.444436",
    ),
    Case(
        f"{FACTORY}/5071",
        "EI0006: 2024-08-05-18:15:21.270.506 Getting socket times out. Reason: Remote Rank did not send the data in "
        "time. Please check the reason for the rank being stuck\n"
        "        Solution: 1. Check the rank service processes with other errors or no errors in the cluster.\n",
        ["EI0006"],
        time="2024-08-05T18:15:21.270506",
    ),
    Case(
        f"{FACTORY}/3839",
        "[ERROR] 2024-05-21-11:57:54 (PID:927000, Device:3, RankID:3) ERR02200 DIST call hccl api failed.\n"
        "EJ0001: 2024-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training "
        "process is running.\n"
        "        Fail to get sq reg virtual addr, deviceId=3, sqId=40.[FUNC:Setup][FILE:stream.cc][LINE:1102]\n",
        ["EJ0001"],
        device=3,
        time="2024-05-21T11:57:54.167645",
    ),
    Case(
        f"{VLLM_ASCEND}/3413",
        "[ERROR] 2025-10-11-15:09:34 (PID:2969, Device:0, RankID:101) ERR00100 PTA call acl api failed.\n"
        "EI0002: [PID: 2969] 2025-10-11-15:09:34.713.335 The wait execution of the Notify register times out. Reason: "
        "The Notify register has not received the Notify record from remote rank: [24].\n",
        ["EI0002"],
        rank=101,
        device=0,
        pid=2969,
        time="2025-10-11T15:09:34.713335",
    ),
    Case(
        "https://github.com/Ascend/pytorch/issues/54",
        "RuntimeError: ACL stream synchronize failed.\nEI9999: Inner Error!\n"
        "EI9999: 2024-10-21-10:42:00.358.410  The error from device(chipId:3, dieId:0), serial number is 9, hccl "
        "fftsplus task timeout occurred during task execution, stream_id:5\n",
        ["EI9999", "EI9999", "EI0002"],
        device=3,
        time="2024-10-21T10:42:00.358410",
    ),
    Case(
        f"{VLLM_ASCEND}/405",
        "[rank0]: [ERROR] 2025-03-26-17:01:03 (PID:159, Device:0, RankID:-1) ERR02200 DIST call hccl api failed.\n"
        "[rank0]: EJ0003: [PID: 159] 2025-03-26-17:01:02.816.428 Failed to bind the IP port. Reason: The IP address "
        "and port have been bound already.\n",
        ["EJ0003"],
        rank=0,
        device=0,
        pid=159,
        time="2025-03-26T17:01:02.816428",
    ),
    Case(
        f"{VLLM_ASCEND}/4725",
        "[ERROR] HCCL(60570,):2025-12-04-14:46:07.911.312 [hccl_socket.cc:106] [60570][HcclSocket][Listen] socket "
        "type[0], listen on ip[192.2.2.195] and specific port[16666] fail. Please check the port status\n",
        ["EI0020"],
        pid=60570,
        time="2025-12-04T14:46:07.911312",
    ),
    Case(
        f"{VLLM_ASCEND}/1955",
        "[ERROR] HCCL(2717288,python3):2025-07-23-03:49:57.177.194 [hccl_socket_manager.cc:778] [2734049][Wait]"
        "[LinkEstablish]wait socket establish timeout, role[1] rank[12] timeout[120]\n",
        ["EI0006"],
        pid=2717288,
        time="2025-07-23T03:49:57.177194",
    ),
    Case(
        f"{VLLM_ASCEND}/1815",
        "RuntimeError: EJ0002: [PID: 38079] 2025-07-15-12:45:31.202.787 The network port is down.\n",
        ["EJ0002"],
        pid=38079,
        time="2025-07-15T12:45:31.202787",
    ),
    Case(
        "https://github.com/vllm-project/vllm-ascend/pull/16205", "Communication_Error_Bind_IP_Port(EI0019)", ["EI0019"]
    ),
    Case(
        "https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha002/hccl/hcclug/hcclug_000037.html",
        "EI0008: The CANN versions are inconsistent: tag [HcomAllReduce_6629421139219749105_0], local_version "
        "[1.83.T10.0.B206], remote_version [1.83.T10.0.B207]\n",
        ["EI0008"],
    ),
    Case(
        "https://github.com/PKU-YuanGroup/Helios/issues/62",
        "ERROR 04-09 21:56:46 [diffusion_engine.py:82] [PID: 210907] 2026-04-09-21:56:40.384.694 "
        "Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE module.\n"
        "ERROR 04-09 21:56:46 [diffusion_engine.py:82]         Solution: Close applications not in use.\n",
        ["EL0004"],
        pid=210907,
        time="2026-04-09T21:56:40.384694",
    ),
    Case(
        "https://github.com/hw-native-sys/PTOAS/pull/341",
        "[ERROR] aclrtSetDevice(deviceId) failed: 507033 (main.cpp:72)\n"
        "        open device 2 failed, runtime result = 507033.[FUNC:ReportCallError][FILE:log_inner.cpp][LINE:148]\n",
        ["507033", "507033"],
        device=2,
    ),
    Case(
        f"{VLLM_ASCEND}/2763",
        "EZ9999: [PID: 838] 2025-09-04-09:50:11.954.378 The error from device(chipId:6, dieId:0), serial number is 8, "
        "there is an exception of aivec error, core id is 40, error code = 0\n",
        ["EZ9999"],
        device=6,
        pid=838,
        time="2025-09-04T09:50:11.954378",
    ),
    Case(
        f"{VLLM_ASCEND}/5661",
        "EZ9999[PID: 244584] 2026-01-06-19:37:15.407.487 (EZ9999):  The error from device(chipId:4, dieId:1), serial "
        "number is 91, there is an exception of fftsplus aivector error, core id is 40\n"
        "       Kernel task happen error, retCode=0x26, [aicore exception].[FUNC:PreCheckTaskErr]\n",
        ["EZ9999", "aicore_error"],
        device=4,
        time="2026-01-06T19:37:15.407487",
    ),
    Case(f"{VLLM_ASCEND}/2105", "RuntimeError: ACL stream synchronize failed, error code:507018\n", ["507018"]),
    Case(f"{VLLM_ASCEND}/1972", "RuntimeError: ACL stream synchronize failed, error code:507034\n", ["507034"]),
    Case(
        f"{VLLM_ASCEND}/7676",
        "RuntimeError: synchronize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:361 NPU function error: "
        "c10_npu::acl::AclrtSynchronizeStreamWithTimeout(stream()), error code is 507011\n",
        ["507011"],
    ),
    Case(
        f"{VLLM_ASCEND}/800",
        "ERROR 05-09 08:06:34 [engine.py:448] RuntimeError: GetDevice:compiler_depend.ts:60 NPU function error: "
        "aclrtGetCurrentContext(&used_devices[local_device]), error code is 107002\n"
        "ERROR 05-09 08:06:34 [engine.py:448] EE1001: [PID: 207] 2025-05-09-08:06:34.181.090 The argument is invalid."
        "Reason: rtGetDevMsg execute failed, reason=[context pointer null]\n"
        "ERROR 05-09 08:06:34 [engine.py:448]         [Init][Version]init soc version failed, ret = 507008[FUNC:]\n",
        ["107002", "EE1001", "507008"],
        time="2025-05-09T08:06:34.181090",
    ),
    Case(
        f"{VLLM_ASCEND}/6611",
        "(Worker_TP0 pid=911501) ERROR 02-07 18:18:59 [multiproc_executor.py:824] RuntimeError: NPU out of memory. "
        "Tried to allocate 2.57 GiB (NPU 0; 60.96 GiB total capacity; 57.49 GiB already allocated)\n",
        ["device_out_of_memory"],
        rank=0,
        device=0,
        pid=911501,
    ),
    Case(
        MINDSPORE,
        "[EXCEPTION] DEVICE(170414,fffe397fa1e0,python):2021-09-13-15:29:07.465.388 [ascend_memory_manager.cc:62] "
        "MallocDeviceMemory] Malloc device memory failed, size[32212254720], ret[207001], Device 6 may be other "
        "processes occupying this card, check as: ps -ef|grep python\n",
        ["207001"],
        device=6,
        pid=170414,
        time="2021-09-13T15:29:07.465388",
    ),
    Case(
        MINDSPORE,
        "Malloc device memory failed, free memory size is less than half of total memory size.Device 0 Device MOC "
        "total size:34359738368 Device MOC free size:2140602368 may be other processes occupying this card\n",
        ["device_is_occupied"],
        device=0,
    ),
    Case(
        MINDSPORE,
        "[ERROR] DEVICE(160186,fffdf7fff0f0,python):2023-01-10-09:25:45.337.259 [ascend_kernel_runtime.cc:761] "
        "DumpTaskExceptionInfo] Task fail infos task_id: 3, stream_id: 2, tid: 160186, device_id: 0, retcode: 507011 "
        "( model execute failed)\n",
        ["507011"],
        device=0,
        pid=160186,
        time="2023-01-10T09:25:45.337259",
    ),
    Case(
        MINDSPORE,
        "RuntimeError: Device 8 call rtSetDevice failed, ret[107001]. The details refer to 'Ascend Error Message'.\n"
        "EE1001: The argument is invalid.Reason: Set device failed, invalid device, set device=8\n",
        ["107001", "EE1001"],
        device=8,
    ),
    Case(
        MINDSPORE,
        "        Aicpu kernel execute failed, device_id=0, stream_id=116, fault so_name=libaicpu_kernels.so, "
        "fault kernel_name=GetNext, fault op_name=, extend_info=[FUNC:GetError][FILE:stream.cc][LINE:701]\n",
        ["aicpu_error"],
        device=0,
    ),
    Case(
        MINDSPORE,
        "        serverId[10.*.*.*], deviceId[0], Heartbeat Lost Occurred, Possible Reason: 1. Process has exited\n",
        ["heartbeat_lost"],
        device=0,
    ),
    Case(
        "https://github.com/Ascend/cann-container-image/issues/46",
        "dcmi model initialized failed, because the device is used. ret is -8020\n",
        ["device_is_occupied"],
    ),
    Case(f"{VLLM_ASCEND}/2698", "dcmi module initialize failed. ret is -8005\n", ["device_is_occupied"]),
    Case(f"{VLLM_ASCEND}/262", "ImportError: libhccl.so: cannot open shared object file\n", ["set_env_missing"]),
    Case(
        f"{VLLM_ASCEND}/1440",
        "libascend_hal.so: cannot open shared object file: No such file or directory\n",
        ["driver_not_found"],
    ),
    Case(
        "https://github.com/hicann/runtime (error_code.json, EE1015)",
        "rtMemcpy failed. Reason: The driver version capability is insufficient. \n",
        ["EE1015"],
    ),
    Case(
        "mindspore 2.9.0, run_check/_check_version.py",
        "[WARNING] ME(77:140,MainProcess):2026-11-21-12:00:00.123.456 [_check_version.py:301] MindSpore version 2.9.0 "
        "and Ascend AI software package (Ascend Data Center Solution)version 8.0 does not match, the version of "
        "software package expect one of ['8.2', '8.3', '8.5', '9.0'].\n",
        ["cann_mismatch"],
        time="2026-11-21T12:00:00.123456",
    ),
    Case(
        f"{VLLM_ASCEND}/4284",
        "E30006: 2025-11-19-11:14:58.516.606 Failed to verify the OPP\n        Solution: 1. Use a correct OPP.\n",
        ["E30006"],
        time="2025-11-19T11:14:58.516606",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.codes[0]}-{case.source.rsplit('/', 1)[-1]}")
def test_a_public_log_line_is_recognised(case):
    file = LogFile("posted").read(case.lines.splitlines(keepends=True))
    assert [sighting.entry.code for sighting in file.sightings] == case.codes
    last = file.sightings[-1]
    assert [last.rank, last.device, last.time] == [
        case.rank,
        case.device,
        datetime.fromisoformat(case.time) if case.time else None,
    ]
    assert case.pid in (last.pid, None)


INNOCENT = [
    "[INFO] HCCL(860,):2025-12-31-07:42:50.708.882 [externalinput.cc:372] HCCL_CONNECT_TIMEOUT EI0006 default 120",
    'For detailed troubleshooting guidance, search for the keyword "EI0002" on https://www.hiascend.com/document/.',
    "(PID: 507018) loaded 207001 tensors in 107002 ms",
    "E20240704 19:33:26.891712 147473 DeviceManager.cpp:274] ",
    "cmpl-48c69477b92c43cca40703b9988dec3e finished, 507011 tokens",
    "        Possible Cause: 1. An exception occurs during the execution on some NPUs (EI0099)",
]


@pytest.mark.parametrize("line", INNOCENT)
def test_text_that_only_resembles_a_code_is_ignored(line):
    assert LogFile("log").read([line]).sightings == []
