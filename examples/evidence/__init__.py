"""What corrections do to training: many small runs at once, as lists of runs that a study can go on with.

``studies.py`` says what runs; ``ensemble.py`` trains all runs of a group in one set of batched operations, with
mis_ext's own correction; ``engines.py`` samples, either with SGLang or with controlled noise; ``verdicts.py`` draws the
conclusions. Start with ``examples/evidence.sh``.
"""
