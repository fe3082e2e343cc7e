"""Flash decoding from bytes on a GPU: the Triton programs that `byte_attention.gpu` and `scan_attention.gpu` launch.

| file | what |
|---|---|
| entries.py | bytes to float16 columns: one look-up of float16, one or two of int8 |
| program.py | attention of a KV head's query rows to one range of its tokens |
| merging.py | the ranges of one row become one |
| arguments.py | what the programs are given: tensors with strides, and what they are compiled for |
| launch.py | how tokens are split, how a launch is tuned |
"""
