#!/usr/bin/env bash
# A small certificate authority for a fleet: for tests and for fleets that have no PKI of their own.
# Keep ca.key off the machines of the fleet: whoever holds it can be any node.
set -euo pipefail
umask 077

usage() {
  cat >&2 <<'TEXT'
usage: certs.sh ca DIR                     make the CA (ca.pem, ca.key)
       certs.sh coordinator DIR HOST...    the coordinator's certificate; HOST: every name or IP address that members dial
       certs.sh node DIR NODE...           a certificate for each node; its common name is the node id
       certs.sh server DIR NODE HOST...    that of a node which others dial (a region, fleetddp serve), at these names or addresses
Each PEM file lies beside its .key in DIR. Nothing is overwritten. DAYS (default 825) sets how long a certificate is valid.
TEXT
  exit 2
}

fail() {
  echo "certs.sh: $1" >&2
  exit 1
}

request() { # KEY COMMON_NAME: a new key; the certificate request goes to stdout
  [ ! -e "$1" ] || fail "$1 exists already; remove it to have it made anew"
  openssl ecparam -name prime256v1 -genkey -noout -out "$1"
  openssl req -new -key "$1" -subj "/CN=$2"
}

sign() { # NAME COMMON_NAME EXTENSIONS
  [ -e "$dir/ca.key" ] || fail "there is no CA in $dir yet: certs.sh ca $dir"
  request "$dir/$1.key" "$2" |
    openssl x509 -req -CA "$dir/ca.pem" -CAkey "$dir/ca.key" -days "$days" -out "$dir/$1.pem" \
      -extfile <(printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n%s\n' "$3")
  echo "$dir/$1.pem"
}

make_ca() {
  [ $# -eq 0 ] || usage
  mkdir -p "$dir"
  request "$dir/ca.key" "FleetDDP CA" |
    openssl x509 -req -signkey "$dir/ca.key" -days "$days" -out "$dir/ca.pem" \
      -extfile <(printf 'basicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\n')
  echo "$dir/ca.pem"
}

alternative_names() { # HOST...
  local host names=""
  for host in "$@"; do
    case $host in
      *[!A-Za-z0-9._:-]* | -* | "") fail "'$host' is neither a host name nor an IP address" ;;
      *:*) names+=",IP:$host" ;;
      *[!0-9.]*) names+=",DNS:$host" ;;
      *) names+=",IP:$host" ;;
    esac
  done
  echo "subjectAltName=${names#,}"
}

make_coordinator() {
  [ $# -gt 0 ] || usage
  local names
  names=$(alternative_names "$@")
  sign coordinator coordinator "extendedKeyUsage=serverAuth
$names"
}

check_node() { # NODE
  [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] || fail "'$1' is not a node id: up to 64 letters, digits, '.', '_' or '-'"
  [[ $1 != ca && $1 != coordinator ]] || fail "a node cannot be called '$1' here"
}

make_server() {
  [ $# -gt 1 ] || usage
  local node=$1 names
  check_node "$node"
  shift
  names=$(alternative_names "$@")
  sign "$node" "$node" "extendedKeyUsage=serverAuth,clientAuth
$names"
}

make_nodes() {
  [ $# -gt 0 ] || usage
  local node
  for node in "$@"; do
    check_node "$node"
    sign "$node" "$node" "extendedKeyUsage=clientAuth"
  done
}

[ $# -ge 2 ] || usage
command=$1 dir=$2 days=${DAYS:-825}
shift 2
case $command in
  ca) make_ca "$@" ;;
  coordinator) make_coordinator "$@" ;;
  node) make_nodes "$@" ;;
  server) make_server "$@" ;;
  *) usage ;;
esac
