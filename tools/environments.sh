# Sourced by the scripts that make virtual environments. They use uv, which needs seconds where pip needs minutes; here
# it gets pip's configuration, which it does not read.
command -v uv >/dev/null || {
  echo "$0 needs uv: pip install uv" >&2
  exit 1
}
export PIP_SETTINGS=${PIP_SETTINGS-$(python3 -m pip config list)} # read once for all environments: it takes half a second
pip_setting() { sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" <<<"$PIP_SETTINGS" | tr '\n' ' ' | sed 's/ *$//'; }

defaults() { # NAME VALUE: exports it where there is a value and the name has none
  if [ -n "$2" ] && [ -z "${!1:-}" ]; then export "$1=$2"; fi
}
defaults UV_DEFAULT_INDEX "$(pip_setting index-url)"
defaults UV_INDEX "$(pip_setting extra-index-url)"
defaults UV_FIND_LINKS "$(pip_setting find-links | tr ' ' '\n' | sort -u | paste -sd ,)"
defaults UV_CONSTRAINT "$(pip_setting constraint)"
defaults SSL_CERT_FILE "$(pip_setting cert | cut -d ' ' -f 1)"
defaults UV_INDEX_STRATEGY unsafe-best-match # pip's: the best version of any index
