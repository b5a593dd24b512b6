"""Op by op: what each implementation costs on this machine beside what the hardware allows, and advice beforehand.

`cases` says what is measured, `clock` how, `gate` what has to be right first, `measure` puts a row together; `cards`,
`limits`, `waves` and `predict` are the arithmetic that needs no GPU, and `advice` applies it to a model.
"""

from fusedmlp.bench.advice import advise

__all__ = ["advise"]
