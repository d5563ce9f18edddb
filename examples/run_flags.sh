# Sets $flags to what the run's configuration needs: the file after --custom-config-path, else yaml/mis.yaml. To be
# sourced from the repository's root, with $venv set.
config=yaml/mis.yaml
previous=
for argument in "$@"; do
    [[ "$previous" != --custom-config-path ]] || config="$argument"
    [[ "$argument" != --custom-config-path=* ]] || config="${argument#*=}"
    previous="$argument"
done
quoted="$("$venv/bin/python" examples/launch_flags.py "$config")"
eval "flags=($quoted)"
