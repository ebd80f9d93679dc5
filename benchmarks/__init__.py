"""How fast ckptd is, beside its peers and the machine's own limits: `make bench`. See docs/BENCHMARKS.md."""
