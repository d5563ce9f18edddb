# SPDX-License-Identifier: Apache-2.0
# Checkouts of the hosts at pinned commits, and environments for them. To be sourced, from the repository's root.

# checkout_at VARIABLE NAME URL COMMIT: sets VARIABLE to a checkout. The one that it names already is taken as it is, with
# a warning if it is of another commit. Else git fetches the commit into .checkouts/NAME.
checkout_at() {
    local variable="$1" name="$2" url="$3" commit="$4" found
    local given="${!variable:-}" folder=".checkouts/$2"
    if [[ -n "$given" ]]; then
        [[ -d "$given" ]] || { echo "$variable=$given: there is no such folder" >&2; return 1; }
        found="$(git -C "$given" rev-parse HEAD 2> /dev/null || echo "unknown")"
        if [[ "$found" != "$commit" ]]; then
            echo "warning: $variable=$given is at commit $found; this was tested with $commit" >&2
        fi
        printf -v "$variable" '%s' "$(realpath -- "$given")"
        return
    fi
    if [[ "$(git -C "$folder" rev-parse HEAD 2> /dev/null)" != "$commit" || ! -e "$folder/.git" ]]; then
        git init --quiet "$folder"
        if ! GIT_TERMINAL_PROMPT=0 git -C "$folder" fetch --quiet --depth 1 "$url" "$commit"; then
            echo "cannot fetch $url: clone it elsewhere, and set $variable to a checkout of commit $commit" >&2
            return 1
        fi
        git -C "$folder" checkout --quiet --force FETCH_HEAD
    fi
    printf -v "$variable" '%s' "$PWD/$folder"
}

# install_host REQUIREMENTS: makes the environment $venv for a host on the first run, and anew when the file changes.
install_host() {
    local requirements="$1" shared=requirements/slime-cpu.txt installed="$venv/.installed"
    # Written last, so that an interrupted installation is taken up again.
    if [[ ! -e "$installed" || "$requirements" -nt "$installed" || "$shared" -nt "$installed" ]]; then
        [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
        "$venv/bin/pip" install "$(grep '^torch==' "$shared")"
        "$venv/bin/pip" install --no-deps -r "$requirements"
        "$venv/bin/pip" install --no-deps -e .
        touch "$installed"
    fi
}
