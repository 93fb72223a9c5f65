// Python bindings of the I/O engine. Addresses arrive as integers; the caller keeps that memory until wait()
// returns.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <tuple>

#include "bind.h"
#include "io_engine.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace io = greedysnake::io;

namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

void make_engine(io::Engine* self, bool use_uring, size_t queue_depth, size_t num_threads, size_t piece_bytes,
                 double read_bytes_per_s, double write_bytes_per_s, double total_bytes_per_s) {
    const io::EngineConfig config{
        use_uring, queue_depth, num_threads, piece_bytes, {read_bytes_per_s, write_bytes_per_s, total_bytes_per_s}};
    try {
        new (self) io::Engine(config);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, nullptr);
        throw nb::python_error();
    }
}

std::optional<uint64_t> submit(io::Engine& self, bool is_write, int fd, int64_t offset, uintptr_t address,
                               size_t nbytes, bool urgent, size_t alignment) {
    return self.submit({is_write, fd, offset, reinterpret_cast<std::byte*>(address), nbytes, urgent, alignment});
}

std::tuple<int, size_t> wait(io::Engine& self, uint64_t ticket) {
    const io::Outcome outcome = self.scheduler().wait(ticket);
    return {outcome.error, outcome.got};
}

bool poll(io::Engine& self, uint64_t ticket) { return self.scheduler().poll(ticket); }

void add_fault(io::Engine& self, const std::string& kind, int64_t value, const std::string& direction, uint64_t nth,
               double probability, uint64_t seed, size_t piece) {
    const auto kind_of = [&kind] {
        if (kind == "error") return io::FaultKind::kError;
        if (kind == "short") return io::FaultKind::kShort;
        if (kind == "eof") return io::FaultKind::kEof;
        if (kind == "delay") return io::FaultKind::kDelay;
        if (kind == "flip") return io::FaultKind::kFlip;
        throw std::invalid_argument("unknown fault kind " + kind);
    };
    const auto direction_of = [&direction] {
        if (direction == "any") return io::Direction::kAny;
        if (direction == "read") return io::Direction::kRead;
        if (direction == "write") return io::Direction::kWrite;
        throw std::invalid_argument("unknown fault direction " + direction);
    };
    self.scheduler().add_fault({kind_of(), value, piece}, direction_of(), nth, probability, seed);
}

std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, double, size_t> counters(io::Engine& self) {
    const io::Counters c = self.scheduler().counters();
    return {c.bytes[0], c.bytes[1], c.requests[0], c.requests[1], c.busy_s, c.peak_in_flight};
}

}  // namespace

void bind_io(nb::module_& m) {
    nb::class_<io::Engine>(m, "IoEngine")
        .def("__init__", &make_engine, "use_uring"_a, "queue_depth"_a, "num_threads"_a, "piece_bytes"_a,
             "read_bytes_per_s"_a, "write_bytes_per_s"_a, "total_bytes_per_s"_a)
        .def("submit", &submit, "is_write"_a, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, "urgent"_a, "alignment"_a,
             ReleaseGil())
        .def("wait", &wait, "ticket"_a, ReleaseGil())
        .def("poll", &poll, "ticket"_a, ReleaseGil())
        .def("counters", &counters, ReleaseGil())
        .def("add_fault", &add_fault, "kind"_a, "value"_a, "direction"_a, "nth"_a, "probability"_a, "seed"_a, "piece"_a,
             ReleaseGil())
        .def(
            "clear_faults", [](io::Engine& self) { self.scheduler().clear_faults(); }, ReleaseGil())
        .def("close", &io::Engine::close, "cancel"_a, ReleaseGil());

    m.def("probe_uring", [] {
        const io::Probe probe = io::probe_uring();
        return std::make_tuple(probe.error, probe.step);
    });
    m.def("direct_alignment", [](int fd) {
        const io::DirectAlignment found = io::direct_alignment(fd);
        return std::make_tuple(found.known, found.memory, found.offset);
    });
}
