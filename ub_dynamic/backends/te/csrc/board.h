// SPDX-License-Identifier: Apache-2.0
// The fast path of the rank board: publish a change and compare it with what the other ranks have published.
//
// Rules, errors and the layout of the memory are those of ub_dynamic/board.py. This only answers whether all is
// well; where it is not, the Python side looks again and says what is wrong.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

namespace ub_dynamic {

class Board {
 public:
  static constexpr std::int64_t kHeader = 2;  // words a rank before its records: changes, process id

  // `words`: the shared memory; `compared`: per rank, up to which change it was compared with ours.
  Board(pybind11::buffer words, pybind11::buffer compared, std::int64_t rank, std::int64_t size, std::int64_t slots,
        std::int64_t ahead)
      : words_owner_(words.request(true)), compared_owner_(compared.request(true)),
        words_(static_cast<std::int64_t *>(words_owner_.ptr)),
        compared_(static_cast<std::int64_t *>(compared_owner_.ptr)), rank_(rank), size_(size), slots_(slots),
        ahead_(ahead) {
    const bool fits = words_owner_.itemsize == 8 && words_owner_.size == size * (kHeader + slots) &&
                      compared_owner_.itemsize == 8 && compared_owner_.size == size;
    if (!fits) throw std::runtime_error("the memory of the rank board does not have the expected size");
  }

  // What became of a change: the Python side has to look where it is not agreed on.
  enum class Answer { kNotMade, kAgreed, kPublished };

  // Publishes the next change of this rank if the others agree as far as they are, and looks at them again: of two
  // ranks that differ and publish at the same moment, one sees the other.
  Answer exchange(std::int64_t tokens) {
    std::int64_t *own = words_ + rank_ * (kHeader + slots_);
    const std::int64_t calls = own[0] + 1, record = calls << 32 | tokens;
    if (!all_agree(own, calls, record)) return Answer::kNotMade;
    __atomic_store_n(own + kHeader + calls % slots_, record, __ATOMIC_RELEASE);
    __atomic_store_n(own, calls, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return all_agree(own, calls, record) ? Answer::kAgreed : Answer::kPublished;
  }

 private:
  bool all_agree(const std::int64_t *own, std::int64_t calls, std::int64_t record) {
    for (std::int64_t rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && !agrees(own, rank, calls, record)) return false;
    }
    return true;
  }

  // Whether the other rank's records are ours, up to change number `calls`, of which ours will be `record`. Reads the
  // other rank's records alone, one cache line: a record says itself which change it is of.
  bool agrees(const std::int64_t *own, std::int64_t rank, std::int64_t calls, std::int64_t record) {
    const std::int64_t *other = words_ + rank * (kHeader + slots_);
    for (std::int64_t call = compared_[rank] + 1; call <= calls; ++call) {
      const std::int64_t slot = kHeader + call % slots_;
      const std::int64_t theirs = __atomic_load_n(other + slot, __ATOMIC_ACQUIRE);
      if (theirs >> 32 < call) break;  // not made yet
      if (theirs != (call == calls ? record : own[slot])) return false;
      if (call <= own[0]) compared_[rank] = call;  // not before ours is published
    }
    return calls - compared_[rank] <= ahead_;
  }

  pybind11::buffer_info words_owner_, compared_owner_;
  std::int64_t *words_, *compared_;
  std::int64_t rank_, size_, slots_, ahead_;
};

}  // namespace ub_dynamic
