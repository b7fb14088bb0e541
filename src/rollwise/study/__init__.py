"""Studies: several methods, several seeds, one workload.

`spec` reads and checks what is asked, `run` makes the runs, `aggregate` turns them into figures with intervals.
"""
