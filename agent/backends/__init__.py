"""The code that differs between devices: tables of operators, facts about the device, hooks around runs of a graph, and
the set-up of MindSpore. ``agent.backends.base`` defines the interface."""
