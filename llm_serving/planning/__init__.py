"""How much memory a deployment needs, and how much the machine has."""
