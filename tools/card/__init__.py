"""The parts of `python -m tools.gpu --quick`: each asks a graphics card one question, and says the answer.

Each module is a program, as in `python -m tools.card.order`. With torch and a card that it reaches, memory and kernels
are torch's. Otherwise they are the driver's, by ctypes. The answers are lines of JSON; see `tools.card.say`.
"""
