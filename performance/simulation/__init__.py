"""The simulator runs a load test in about a second, without a device and without a server.

main            the program, from the command line to the exit code
options         the command line
setup           config, device and settings of one run
requests        prompts and arrival times: generated, from a trace, or from a load test
workload        open loop and closed loop
server          the server on a virtual clock: it drives the real scheduler as the engine does
agent           the agent on a virtual clock: a queue, and a device that runs one step at a time
work            the amount of work in a step
device          the time of that work, calculated from the device's rates (roofline)
presets         the rates of known devices, with their sources
fit             the time of that work, fitted to measured steps
spread          the deviations of single steps from the fit, and how long they last
slowdown        how much slower the machine is than it was when it was fitted
recording       the steps and requests of a flight recording
host            the time that the server process adds
runs, report    one run with a load test's figures; tables and JSON
rate            the highest request rate at which the objectives are met
validate        simulation compared with a load test
reality         the program that compares simulations with real runs
steadiness      whether the machine's speed was constant during a real run
batching        the comparison of batching modes, real or simulated
"""
