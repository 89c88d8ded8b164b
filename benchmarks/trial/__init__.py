"""The trial of methods on the tiny Stable Diffusion pipeline: same rollouts, same steps, tuned rates, several seeds.

`regimes` and `methods` say what is compared, `plan` which runs that takes, `job` makes one run, `store` keeps its file,
`summary` turns the files into numbers and `drawing` into a figure.
"""
