#!/usr/bin/env bash
# Measures what a stranger's first hour costs, and writes figures/tables/first_hour.csv and .md for docs/reproduce.md. Each
# command of the page runs in a fresh clone of the last commit, with no cached model; torch comes from the index that pip is
# configured with. Run it on an idle machine:
#     bash benchmarks/first_hour.sh
# A row has wall minutes, processor seconds, megabytes of disk that were added, and megabytes of the largest process.
set -euo pipefail
repository=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet . "$work/igcore"
cd "$work/igcore"
export IGCORE_HOME=$work/models
table=$work/first_hour.csv
echo "step,minutes,processor s,disk MB,memory MB" > "$table"

step() { # NAME COMMAND...: run a command and append its row
  name=$1
  shift
  before=$(du -sm "$work" | cut -f1)
  echo "first hour: $name"
  /usr/bin/time --output="$work/spent" --format='%e %U %S %M' "$@"
  added=$(($(du -sm "$work" | cut -f1) - before))
  awk -v name="$name" -v added="$added" \
    '{ printf "%s,%.1f,%.0f,%d,%.0f\n", name, $1 / 60, $2 + $3, added, $4 / 1024 }' "$work/spent" >> "$table"
}

python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir --constraint constraints.txt)
step "install torch for processors" "${pip[@]}" torch
step "install igcore and the libraries of its small models" "${pip[@]}" '.[embedded]'
awk '/^```$/ { if (inside) exit } inside; /^```python$/ { inside = 1 }' README.md > "$work/example.py"
step "the example above with the download of its model" "$work/venv/bin/python" "$work/example.py"
step "the example again" "$work/venv/bin/python" "$work/example.py"
step '`make assets`: install everything and download the other models' make assets
step '`make reproduce`' make reproduce
step '`make reproduce` again' make reproduce
step '`make test`' make test

cp "$table" "$repository/figures/tables/first_hour.csv"
.venv/bin/python -c "import pandas, sys; print(pandas.read_csv(sys.argv[1]).to_markdown(index=False))" "$table" \
  > "$repository/figures/tables/first_hour.md"
