#pragma once

#if defined(__CUDACC__)
#define AGMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define AGMM_HOST_DEVICE inline
#endif
