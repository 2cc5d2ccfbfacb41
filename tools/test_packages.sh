#!/usr/bin/env bash
# Installs the Debian packages with which the tests build hosts, networks and a cluster: sshd, nft, tc,
# ip, Slurm, Open MPI 4, Java for Spark, and a browser. Without them those tests are skipped, and say why. It also
# installs ccache, with which CMake compiles no file twice.
set -euo pipefail

packages=(ccache chromium iproute2 munge nftables openjdk-17-jre-headless openmpi-bin openssh-client openssh-server
  slurm-client slurm-wlm slurmctld slurmd)

if ! command -v apt-get >/dev/null; then
  echo "no apt-get here: tests of several hosts, Slurm, Spark and in a browser run where you install ${packages[*]}"
elif [ "$(id -u)" != 0 ]; then
  echo "not root: tests of several hosts, Slurm, Spark and in a browser need root and ${packages[*]}"
elif dpkg -s "${packages[@]}" >/dev/null 2>&1; then
  echo "all installed: ${packages[*]}"
else
  export DEBIAN_FRONTEND=noninteractive
  # No daemon is started by the installation; the tests start their own.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  { apt-get update -qq && apt-get install -qq --no-install-recommends "${packages[@]}"; } ||
    echo "apt-get failed: tests of several hosts, Slurm, Spark and in a browser are skipped"
fi
