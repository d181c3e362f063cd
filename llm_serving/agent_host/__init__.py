"""The process on a node: starts the agents of one replica on its machine and connects them with a server elsewhere.

    python -m llm_serving.agent_host --listen 10.0.0.5:7450 --key-file cluster.key

It uses the server's own code for agents on the same machine (``executor.AgentGroup``). It never imports MindSpore or
Ray. It has no HTTP, no scheduler and no tokenizer.
"""
