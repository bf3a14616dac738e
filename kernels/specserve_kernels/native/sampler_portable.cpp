// The plain build of sampler_loops.h: any machine.
#include "sampler_loops.h"

namespace specserve {

void philox_block(const NoiseStream& stream, uint64_t part, uint64_t block, uint64_t words[4]) {
  philox(stream, part, block, words);
}

const SamplerLoops SAMPLER_PORTABLE = {"portable",  best_of,   near_of,
                                        mass_of,   masses_of, next_group_of};

}  // namespace specserve
