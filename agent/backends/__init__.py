"""Contains the code that differs between devices. It makes operators, states properties of the device, runs code before
and after each graph, and sets MindSpore up. ``agent.backends.base`` defines the interface.
"""
