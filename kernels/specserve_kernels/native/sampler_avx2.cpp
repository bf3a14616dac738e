// build[x86_64]: -mavx2 -mbmi -mbmi2
#include "sampler_loops.h"

namespace specserve {

const SamplerLoops SAMPLER_AVX2 = {"avx2",  best_of,   near_of,
                                        mass_of,   masses_of, next_group_of};

}  // namespace specserve
