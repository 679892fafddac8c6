// Writing the blocks of S4 and S8 (linear_stream.h), and reading their values again.
#pragma once

#include "linear_stream.h"
#include "pack_source.h"

namespace trimaran {

// The view of a weight whose codes are of `format`; without data.
LinearView stream_view(int outputs, int inputs, const CodeFormat& format);

// Writes a block from the codes of its 16 outputs, [16][steps].
//
// A multiplier is the power of two that brings the largest magnitude of its output into
// (0.9375, 1.875]. Slopes and offsets make up for the cut, and are rounded to float16 so that
// the code in the middle of those used keeps its value.
void write_stream_block(const LinearView& view, const CodeFormat& format,
                        const StepCodes* outputs, std::uint8_t* block);

// Step `step` of one output of a block: [32], as the tiles see it times the multiplier.
void read_stream_step(const LinearView& view, const std::uint8_t* block, int lane, int step,
                      float* values);

}  // namespace trimaran
