"""The process of a node: starts the agents of one replica on its machine, and connects them to a server on another
machine.

    python -m llm_serving.agent_host --listen 10.0.0.5:7450 --key-file cluster.key

A node runs the agents with the same code as a server with local agents (``executor.AgentGroup``). The node never
imports MindSpore or Ray, and has no HTTP, no scheduler and no tokenizer.
"""
