# SPDX-License-Identifier: Apache-2.0
# Miles and its fork of Megatron-LM at pinned commits. To be sourced, from the repository's root.
source lab/hosts/checkouts.sh

failed=""
checkout_at MILES_DIR miles https://github.com/radixark/miles 31f1ca961a94cb860cec3b2dea34ec332bfa8f76 || failed=1
# Of the branch miles-main, which Miles' docker/Dockerfile names.
checkout_at MILES_MEGATRON_DIR miles-Megatron-LM https://github.com/radixark/Megatron-LM \
    2e64d788b67fe8155774200c87606e1e449c494b || failed=1
[[ -z "$failed" ]] || exit 1
