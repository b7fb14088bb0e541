"""Reports: one HTML page of what runs and studies measured.

`runs` finds and reads the runs, `data` gathers plain values from them, `figures` draws, `render` makes the page.
"""
