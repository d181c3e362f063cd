"""The simulator runs a load test in about a second, without a device and without a server.

main            the program, from the command line to the exit code
options         the command line
setup           config, device and settings of one run
requests        prompts and arrival times: generated, from a trace, or from a load test
workload        open loop and closed loop
server          the server on a virtual clock: it drives the real scheduler as the engine does
agent           the agent on a virtual clock: a queue, and a device that runs one step at a time
work            the amount of work in a step
device          the time of a step, calculated from the device's rates (roofline)
presets         the rates of known devices, with their sources
fit             the time of a step, calculated by a formula that is fitted to measured steps
spread          the deviations of single steps from the fit, and how long they last
slowdown        how much slower the machine is now than during the measurements of the fit
recording       extracts step times and requests from a flight recording
host            the time that the server process adds to a step
runs            one simulated run, with the figures of a load test
report          text and JSON of simulated runs
rate            finds the highest request rate at which the objectives are met
validate        compares a simulation with a load test
reality         the program that fits the simulator to this machine and compares it with real runs
steadiness      decides whether the machine's speed was constant during a real run
batching        the program that compares batching modes, on real servers or in the simulator
"""
