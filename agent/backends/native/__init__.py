"""MindSpore's inference primitives themselves, as an Ascend runs them; on a CPU our kernels stand behind them."""
