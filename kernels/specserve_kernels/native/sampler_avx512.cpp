// build[x86_64]: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mbmi -mbmi2 -mprefer-vector-width=512 -Wno-maybe-uninitialized
#include "sampler_loops.h"

namespace specserve {

const SamplerLoops SAMPLER_AVX512 = {"avx512",  best_of,   near_of,
                                        mass_of,   masses_of, next_group_of};

}  // namespace specserve
