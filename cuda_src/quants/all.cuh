// Every format. A kernel is compiled for one by -DFORMAT=name.
#pragma once

#include "quants/bf16.cuh"
#include "quants/f16.cuh"
#include "quants/f32.cuh"
#include "quants/iq4_nl.cuh"
#include "quants/iq4_xs.cuh"
#include "quants/mxfp4.cuh"
#include "quants/q2_k.cuh"
#include "quants/q3_k.cuh"
#include "quants/q4_0.cuh"
#include "quants/q4_1.cuh"
#include "quants/q4_k.cuh"
#include "quants/q5_0.cuh"
#include "quants/q5_1.cuh"
#include "quants/q5_k.cuh"
#include "quants/q6_k.cuh"
#include "quants/q8_0.cuh"
