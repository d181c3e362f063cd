"""The native op table: MindSpore's inference primitives. An Ascend runs them itself; on a CPU our kernels run them."""
