"""Lists the addresses of the public documents to which ``errors.ini`` and the checks refer."""

from __future__ import annotations

_HIASCEND = "https://www.hiascend.com/document/detail"

MINDSPORE_CANN_CASES = "https://www.mindspore.cn/tutorials/en/r2.10.0/debug/error_analysis/cann_error_cases.html"
MINDFORMERS_VERSIONS = "https://www.mindspore.cn/mindformers/docs/en/r1.9.0/installation.html"
CANN_910_RELEASE = f"{_HIASCEND}/en/CANNCommunityEdition/910/softwareinst/releasenote/9.1.0/release-notes.md"
MINDIE_RELEASE = f"{_HIASCEND}/zh/mindie/21RC1/releasenote/releasenote_0004.html"

ERROR_CODE_JSON = (
    "https://github.com/hicann/runtime/blob/0b98035317fb5b55303b18ee7a36d3729c5bc4aa/"
    "src/dfx/error_manager/error_code.json"
)
"""CANN's list of predefined errors. An installation has it as ``runtime/conf/error_manager/error_code.json``."""
CODE_SCHEME = f"{_HIASCEND}/zh/CANNCommunityEdition/83RC1alpha002/API/codeopenapi/cann_base_api_0005.html"
ACL_ERROR = f"{_HIASCEND}/en/CANNCommunityEdition/910/API/runtimeapi/aclcppdevg_03_6666.html"
RUNTIME_CODES = (
    "https://github.com/hicann/runtime/blob/15c6c8dba7eb6bceeea8a32de42e7241bf35e6e0/"
    "include/external/acl/error_codes/rt_error_codes.h"
)
ACLNN_CODES = f"{_HIASCEND}/en/CANNCommunityEdition/910/API/aolapi/atlasascendc_api_07_1205.html"
GE_E10001 = (
    "https://hiascend.com/document/detail/zh/Atlas200IDKA2DeveloperKit/23.0.RC2/Appendices/ttmutat/atctool_000197.html"
)
LOG_FORMAT = f"{_HIASCEND}/zh/canncommercial/900/maintenref/logreference"
AICORE_ERROR = f"{_HIASCEND}/zh/canncommercial/latest/maintenref/troubleshooting/troubleshooting_0004.html"
HCCL_LOCATING = f"{_HIASCEND}/en/CANNCommunityEdition/900/API/hcclug/hcclug_000025.html"
HCCL_NOTIFY_WAIT = f"{_HIASCEND}/en/CANNCommunityEdition/900/API/hcclug/hcclug_000059.html"
HCCL_ENVIRONMENT = f"{_HIASCEND}/en/CANNCommunityEdition/900/API/hcclug/hcclug_000029.html"
HCCL_CANN_VERSIONS = f"{_HIASCEND}/zh/canncommercial/80RC3/developmentguide/hccl/hcclug/hcclug_000045.html"
HCCL_CONNECT_TIMEOUT = f"{_HIASCEND}/zh/canncommercial/850/maintenref/envvar/envref_07_0149.html"
INSTALL_DRIVER = f"{_HIASCEND}/en/mindsdk/730/Indexn/indexug/mxindexfrug_0009.html"
QUERY_VERSIONS = f"{_HIASCEND}/en/CANNCommunityEdition/910/softwareinst/instg/instg_0064.html"
DRIVER_ERRORS = (
    f"{_HIASCEND}/zh/canncommercial/80RC22/developmentguide/maintenref/troubleshooting/atlaserrorcode_15_0263.html"
)
DEVICE_USED = "https://www.hiascend.com/document/caselibrary/detail/case_9289"
MINDSPORE_INSTALL = "https://www.mindspore.cn/install"
