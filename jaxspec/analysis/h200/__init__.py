"""An experiment for one large accelerator: the paper's speed-ups at the paper's sizes, and a pair trained on the spot.

    python -m jaxspec.analysis.h200 --out h200.json
    python -m jaxspec.analysis.h200 --stages models --shape t5-v1_1-small --new-tokens 8 --seeds 1 --repeats 1

The first needs about 60 GB on the device and 30 on disk; the second is a check of the script that a CPU can run. The
work is cut into stages (`stages`): what each of them finds is on disk before the next begins, the same command goes on
where an earlier one was ended, and a stage that fails or crashes takes no other with it.

`decoding` sets plain decoding of T5-XXL against the memory's floor: the bytes that a token needs (decoder weights,
caches, head) over the bandwidth of a large copy on the same device. Models of random weights agree on nothing, so
acceptance is simulated at the paper's rates (`analysis.measure.synthetic`: the text is nonsense, the time is not), and
speed-ups are set beside the paper's, which were measured on a TPU v4, and beside Theorem 3.8 with c and v as measured.
`profile` shows why where c is large. `loading` writes T5-XXL as a sharded folder and measures the memory that a fresh
process takes to load it. `training` trains the GPT pair and measures its real acceptance and speed.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Tables 2 and 4.
"""
