// Collectives of the simulated accelerator: a backend of torch.distributed that copies tensors to the host, lets gloo
// exchange the copies, and copies back. The host waits for all of it, so it says nothing about NCCL's streams.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Done = c10::intrusive_ptr<Work>;

namespace {

Tensors on_host(const Tensors& tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().cpu().contiguous());
  return copies;
}

void back(const Tensors& tensors, const Tensors& copies) {
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(copies[i]);
}

// A collective that has ended; gloo's own work for a send would wait for a second one.
class Ended : public Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class HostCopies : public c10d::Backend {
 public:
  explicit HostCopies(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "host_copies"; }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return exchange(tensors, [&](Tensors& copies) { return gloo_->broadcast(copies, options); });
  }
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return exchange(tensors, [&](Tensors& copies) { return gloo_->allreduce(copies, options); });
  }
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return exchange(tensors, [&](Tensors& copies) { return gloo_->reduce(copies, options); });
  }
  Done send(Tensors& tensors, int target, int tag) override {
    return exchange(tensors, [&](Tensors& copies) { return gloo_->send(copies, target, tag); });
  }
  Done recv(Tensors& tensors, int source, int tag) override {
    return exchange(tensors, [&](Tensors& copies) { return gloo_->recv(copies, source, tag); });
  }
  Done _allgather_base(Tensor& whole, Tensor& part, const c10d::AllgatherOptions& options) override {
    Tensors outputs{whole}, wholes = on_host(outputs), parts = on_host({part});
    return finish(outputs, wholes, gloo_->_allgather_base(wholes[0], parts[0], options));
  }
  Done allgather_into_tensor_coalesced(
      Tensors& wholes, Tensors& parts, const c10d::AllgatherOptions& options) override {
    Done done;
    for (size_t i = 0; i < wholes.size(); ++i) done = _allgather_base(wholes[i], parts[i], options);
    return done;
  }
  Done _reduce_scatter_base(Tensor& part, Tensor& whole, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{part}, parts = on_host(outputs), wholes = on_host({whole});
    return finish(outputs, parts, gloo_->_reduce_scatter_base(parts[0], wholes[0], options));
  }
  Done barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  template <typename Collective>
  Done exchange(Tensors& tensors, Collective collective) {
    Tensors copies = on_host(tensors);
    return finish(tensors, copies, collective(copies));
  }
  static Done finish(const Tensors& tensors, const Tensors& copies, const Done& done) {
    done->wait();
    back(tensors, copies);
    return c10::make_intrusive<Ended>();
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

void bind_host_copies(py::module& m) {
  m.def(
      "host_copies",
      [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<HostCopies>(std::move(gloo));
      },
      py::call_guard<py::gil_scoped_release>());
}
