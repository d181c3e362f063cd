#include "hand_blocks.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../common/check.h"
#include "../common/thread_pool.h"

namespace llmk {

// The checksum of a block works like that of XXH3 (Collet, 2019). The block is read in stripes of eight 64-bit words,
// one for each of eight lanes. Each lane has a sum. It adds the product of the two halves of its word, after an XOR
// with a key, and the word of the neighbouring lane. The stripes of a round have different keys, and at the end of a
// round the lanes are mixed. So a checksum depends on the order of the bytes. Computing the checksum takes less time
// than copying the block. CRC-32C with one lane would take as long as the copy.
constexpr int64_t kLanes = 8;
constexpr int64_t kStripe = 8 * kLanes;  // bytes of a stripe
constexpr int64_t kRound = 16;           // number of stripes in a round
constexpr int64_t kPiece = 8 << 10;      // bytes that are copied and then summed at a time, within the L1 cache
constexpr int64_t kAhead = 8 << 10;      // bytes of the next part that are prefetched
constexpr uint64_t kMix = 0x9E3779B1;

struct Keys {
  uint64_t of[kLanes + kRound];
  constexpr Keys() : of() {
    uint64_t state = 0;
    for (int64_t i = 0; i < kLanes + kRound; ++i) {
      state += 0x9E3779B97F4A7C15u;  // SplitMix64 (Steele et al., 2014)
      uint64_t key = state;
      key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
      key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
      of[i] = key ^ (key >> 31);
    }
  }
};
static constexpr Keys kKeys;

struct Sum {
  uint64_t lanes[kLanes];
  int64_t stripe;  // number of the next stripe in its round
};

static void end_round(Sum& sum) {
  for (int64_t j = 0; j < kLanes; ++j) {
    uint64_t lane = sum.lanes[j];
    lane ^= lane >> 47;
    sum.lanes[j] = (lane ^ kKeys.of[kRound + j]) * kMix;
  }
  sum.stripe = 0;
}

// Adds `stripes` stripes of 64 bytes to the checksum. All of them belong to the same round.
static void add_plain(Sum& sum, const char* data, int64_t stripes) {
  for (int64_t n = 0; n < stripes; ++n, data += kStripe) {
    uint64_t words[kLanes];
    std::memcpy(words, data, sizeof(words));
    for (int64_t j = 0; j < kLanes; ++j) {
      const uint64_t keyed = words[j] ^ kKeys.of[sum.stripe + n + j];
      sum.lanes[j] += (keyed & 0xFFFFFFFFu) * (keyed >> 32) + words[j ^ 1];
    }
  }
}

#if defined(__x86_64__)
// Copies stripes of 64 bytes, all of one round, and adds them to the checksum in the same pass. Meanwhile prefetches
// the bytes at `next`. If kStreams, the stores bypass the caches, and `to` must be a multiple of 32.
template <bool kStreams>
__attribute__((target("avx2"))) static void copy_avx2(Sum& sum, char* to, const char* from, const char* next,
                                                      int64_t stripes) {
  __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sum.lanes));
  __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sum.lanes + 4));
  const uint64_t* keys = kKeys.of + sum.stripe;
  for (int64_t n = 0; n < stripes; ++n, from += kStripe, to += kStripe, next += kStripe, ++keys) {
    _mm_prefetch(next, _MM_HINT_T0);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    if constexpr (kStreams) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), b);
    }
    const __m256i keyed_a = _mm256_xor_si256(a, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys)));
    const __m256i keyed_b = _mm256_xor_si256(b, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + 4)));
    const __m256i product_a = _mm256_mul_epu32(keyed_a, _mm256_srli_epi64(keyed_a, 32));
    const __m256i product_b = _mm256_mul_epu32(keyed_b, _mm256_srli_epi64(keyed_b, 32));
    low = _mm256_add_epi64(low, _mm256_add_epi64(product_a, _mm256_shuffle_epi32(a, 0x4E)));
    high = _mm256_add_epi64(high, _mm256_add_epi64(product_b, _mm256_shuffle_epi32(b, 0x4E)));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sum.lanes), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sum.lanes + 4), high);
}

static bool has_avx2() {
  static const bool found = __builtin_cpu_supports("avx2") != 0;
  return found;
}
#endif

// Divides `stripes` stripes of 64 bytes into pieces, each of which belongs to one round of the checksum. Calls
// function(begin, count) for each piece: its first byte and its number of stripes. Mixes the lanes of the checksum at
// the end of each round.
template <class Function>
static void for_rounds(Sum& sum, int64_t stripes, const Function& function) {
  for (int64_t begin = 0; begin < stripes;) {
    const int64_t left = kRound - sum.stripe, count = stripes - begin < left ? stripes - begin : left;
    function(begin * kStripe, count);
    sum.stripe += count;
    if (sum.stripe == kRound) end_round(sum);
    begin += count;
  }
}

// Adds bytes to the checksum. If the last stripe is incomplete, zeros fill it.
static void add_bytes(Sum& sum, const char* data, int64_t bytes) {
  const int64_t whole = bytes / kStripe, rest = bytes % kStripe;
  for_rounds(sum, whole, [&](int64_t begin, int64_t count) { add_plain(sum, data + begin, count); });
  if (rest == 0) return;
  char last[kStripe] = {};
  std::memcpy(last, data + whole * kStripe, static_cast<size_t>(rest));
  for_rounds(sum, 1, [&](int64_t, int64_t count) { add_plain(sum, last, count); });
}

static void finish(const Sum& sum, uint64_t* checksum) {
  for (int64_t half = 0; half < 2; ++half) {
    uint64_t value = kKeys.of[half];
    for (int64_t j = 0; j < kLanes; ++j) {
      value = (value ^ sum.lanes[(j + 4 * half) % kLanes]) * 0x9E3779B185EBCA87u;
      value ^= value >> 29;
    }
    checksum[half] = value;
  }
}

// Copies a part of a block and adds its bytes to the checksum. With AVX2, whole stripes are read once, for both the
// copy and the checksum. All other bytes are copied first, and then read again from `summed` for the checksum. The
// pointer `summed` is either `to` or `from`.
//
// At the same time, prefetches the rest of the source, and then `next`, the start of the next part. The parts of a
// block are in different arrays, so the hardware prefetchers cannot find the next part.
//
// If kStreams, the stores bypass the caches. That is faster for blocks that this process does not read again, because a
// usual store first reads the old bytes from memory.
template <bool kStreams>
static void copy_part(char* to, const char* from, const char* summed, [[maybe_unused]] const char* next, int64_t bytes,
                      Sum& sum) {
  int64_t done = 0;
#if defined(__x86_64__)
  if (has_avx2()) {
    if (kStreams && reinterpret_cast<uintptr_t>(to) % 32 != 0)
      return copy_part<false>(to, from, summed, next, bytes, sum);
    done = bytes / kStripe * kStripe;
    for_rounds(sum, bytes / kStripe,
               [&](int64_t begin, int64_t count) {
                 const char* ahead = begin < kAhead ? next + begin : from + begin;
                 copy_avx2<kStreams>(sum, to + begin, from + begin, ahead, count);
               });
  }
#endif
  for (; done < bytes; done += kPiece) {
    const int64_t size = bytes - done < kPiece ? bytes - done : kPiece;
    std::memcpy(to + done, from + done, static_cast<size_t>(size));
    add_bytes(sum, summed + done, size);
  }
}

// Ensures that other processes see the copied bytes before they see any store that follows.
static void end_copy() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void block_checksum(const char* data, int64_t parts, int64_t part_bytes, uint64_t* checksum) {
  Sum sum = {};
  for (int64_t part = 0; part < parts; ++part) add_bytes(sum, data + part * part_bytes, part_bytes);
  finish(sum, checksum);
}

static int check_moves(const char* op, const HandBlocksArgs& args) {
  for (int64_t m = 0; m < args.num_moves; ++m) {
    const int32_t kind = args.moves[3 * m], source = args.moves[3 * m + 1], destination = args.moves[3 * m + 2];
    if (kind != kHandOutBlock && kind != kHandInBlock) return refuse_index(op, "kind", m, kind, kHandInBlock + 1);
    const int64_t source_limit = kind == kHandInBlock ? args.pool_blocks : args.device_blocks;
    const int64_t destination_limit = kind == kHandOutBlock ? args.pool_blocks : args.device_blocks;
    if (source < 0 || source >= source_limit) return refuse_index(op, "source", m, source, source_limit);
    if (destination < 0 || destination >= destination_limit)
      return refuse_index(op, "destination", m, destination, destination_limit);
  }
  return 0;
}

static char* device_part(const HandBlocksArgs& args, int64_t array, int64_t block) {
  return static_cast<char*>(args.device[array]) + block * args.part_bytes;
}

static void hand_out(const HandBlocksArgs& args, int64_t m) {
  const int64_t source = args.moves[3 * m + 1], destination = args.moves[3 * m + 2];
  HandedHeader& header = args.headers[destination];
  std::memset(&header, 0, sizeof(header));
  // First sets the header to zero, before any byte of the block changes. So a process that still reads the old block
  // cannot find the old header together with new bytes.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  char* to = args.pool + destination * args.num_arrays * args.part_bytes;
  Sum sum = {};
  for (int64_t array = 0; array < args.num_arrays; ++array) {
    const char* from = device_part(args, array, source);
    const char* next = device_part(args, array + 1 < args.num_arrays ? array + 1 : 0, source);
    copy_part<true>(to + array * args.part_bytes, from, from, next, args.part_bytes, sum);
  }
  finish(sum, header.checksum);
  end_copy();
  std::memcpy(header.header, args.expected + m * kHeaderBytes, kHeaderBytes);
}

static bool hand_in(const HandBlocksArgs& args, int64_t m) {
  const int64_t source = args.moves[3 * m + 1], destination = args.moves[3 * m + 2];
  const unsigned char* expected = args.expected + m * kHeaderBytes;
  HandedHeader header;
  std::memcpy(&header, &args.headers[source], sizeof(header));
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (std::memcmp(header.header, expected, kHeaderBytes) != 0) return false;
  const char* from = args.pool + source * args.num_arrays * args.part_bytes;
  Sum sum = {};
  for (int64_t array = 0; array < args.num_arrays; ++array) {
    char* to = device_part(args, array, destination);
    const char* next = device_part(args, array + 1 < args.num_arrays ? array + 1 : 0, destination);
    // Computes the checksum from the copied bytes. So it matches the copy even if another process changes the block of
    // the pool at the same time.
    copy_part<false>(to, from + array * args.part_bytes, to, next, args.part_bytes, sum);
  }
  end_copy();
  uint64_t checksum[kChecksumWords];
  finish(sum, checksum);
  return std::memcmp(checksum, header.checksum, sizeof(checksum)) == 0;
}

int hand_blocks(const char* op, const HandBlocksArgs& args) {
  const int error = check_moves(op, args);
  if (error != 0 || args.num_moves == 0) return error;
  parallel_for(args.num_moves, [&](int64_t m) {
    if (args.moves[3 * m] == kHandOutBlock) {
      hand_out(args, m);
    } else if (!hand_in(args, m)) {
      args.faults[m] = 1;
    }
  });
  return 0;
}

}  // namespace llmk
