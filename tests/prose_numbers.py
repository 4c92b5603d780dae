"""Numbers in the chapters' prose that no output shows: what each is made of, or where it is from.

A string that Python can work out is worked out; one that begins with a capital names a source.
"""

GIVEN: dict[str, dict[str, str]] = {
    "00_tour": {
        "0.27": "2 * 134.5e6 / 1e9",  # FLOPs of a row: two for each weight
        "520": "140e9 / 0.27e9",  # the cover's bound
    },
    "01_gpt2_forward": {"3.2": "Vaswani et al. 2017, section", "3000": "e ** 8"},
    "02_llama_forward": {"3.2": "Su et al. 2021, section", "0.0017": "1 / 576"},
    "03_sampling": {
        "49151": "49152 - 1",
        "0.856": "0.77 / 0.90",  # Paris after the cut: its share of what the ten hold
        "8559": "10_000 * 0.7725 / 0.9026",  # the same, with more digits
        "9999": "10_000 - 1",
        "2.1": "6.7 / 10 ** 0.5",
        "0.145": "The shares of nine tokens, added up in the order of their ids",
        "0.998": "1 - 2 ** -9",
    },
    "05_bug_inferred_positions": {"16.4": "The engine in which the fault was met"},
    "06_cost_of_a_pass": {
        "4800": "4.8e12 / 1e9",
        "166": "4.8e12 / 29e9",
        "0.0005": "5e-4",
    },
    "09_continuous_batching": {
        "172": "ceil(1371 / 8)",
        "4.2": "Higham 2002, section",
        "33499": "A pull request of vLLM",
    },
    "10_the_clock": {
        "586": "The benchmark in which the fault was met",
        "1.78": "412 / 231",
        "5.9": "1371 / 231",
        "2.7": "100 * 56 / 2040",
    },
    "11_preemption": {
        "6.4": "A stored output of chapter 10",
        "138": "3152 / 5157 * 226",
        "5.0": "The name of a bus, PCIe 5.0",
        "4.5": "Kwon et al. 2023, section",
        "10.7": "107 / 10",
        "1.8": "346 / 192",
        "9200": "0.212e9 / 23_040",
        "106500": "13.96e9 / 131_072",
    },
    "12_one_stream": {
        "2.3": "576 * 4 / 1000",
        "2304": "576 * 4",
        "2.4": "1 / 2 * 140e9 / 29e9",
        "2.6396": "The README's table of weights in 8 bits",
        "2.6425": "The README's table of weights in 8 bits",
    },
    "13_cuda_kernels": {
        "132": "NVIDIA's data sheet of the H200",
        "270000": "132 * 2048",
        "268": "4000 - 3732",
        "129": "132 - 3",
        "6.3": "2 * 3 * 64 * 8192 * 2 / 1e6",
        "257": "256 + 1",
    },
    "15_speculation": {"0.85": "1 - 0.15"},
    "17_when_speculation_loses": {"3.8": "Leviathan et al. 2023, theorem", "81": "3 ** 4"},
    "18_whole_engine": {
        "12422": "335 + 11_947 + 140",
        "1943": "335 + 468 + 1140",
        "3000": "335 + 2665",
    },
    "A_service": {"332": "318 + 14", "51": "71 - 19 - 1"},
    "B_many_devices": {
        "18.6": "538e6 / 29e9 * 1e3",
        "6.2": "538e6 / 29e9 * 1e3 / 3",
        "12.4": "538e6 / 29e9 * 1e3 * 2 / 3",
        "16384": "49_152 / 3",
        "38400": "761_728 - 723_328",
    },
}
