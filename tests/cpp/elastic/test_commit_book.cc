// The accounts of commits alone: what is due when, and what a commit point hands out.
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

EntryPtr booked(Kind kind, const std::string& name, const std::string& transaction = "",
                std::uint32_t set = 0) {
  EntryPtr entry = change_entry(kind, name);
  entry->request.transaction = transaction;
  entry->request.process_set = set;
  return entry;
}

const Group kAll{0, {0, 1, 2}, 0, 0};

// Holds an entry without a transaction, and commits it.
void commit_one(CommitBook& book, std::uint32_t set = 0) {
  book.hold(booked(Kind::kAllreduce, "one", "", set), kAll);
  CHECK_EQ(book.complete(set).size(), std::size_t{1});
}

void commit_join(CommitBook& book) {
  book.hold(booked(Kind::kJoin, std::string(kJoinName)), kAll);
  CHECK_EQ(book.complete(0).size(), std::size_t{1});
}

}  // namespace

TEST(elastic_book_holds_a_transaction_until_its_commit) {
  CommitBook book;
  book.hold(booked(Kind::kAllreduce, "a", "step"), kAll);
  book.hold(booked(Kind::kAllgather, "b", "step"), kAll);
  book.hold(booked(Kind::kAllreduce, "c", "other"), kAll);
  CHECK(book.due_sets().empty());
  CHECK_EQ(book.rest().size(), std::size_t{3});
  book.hold(booked(Kind::kCommit, "commit", "step"), kAll);
  CHECK(book.due_sets().empty());
  book.end_round();
  CHECK_EQ(book.due_sets(), std::vector<std::uint32_t>{0});
  const auto handed_out = book.complete(0);
  CHECK_EQ(handed_out.size(), std::size_t{3});
  CHECK_EQ(handed_out[0]->request.name, std::string("a"));
  CHECK_EQ(handed_out[2]->request.name, std::string("commit"));
  CHECK(book.due_sets().empty());
  CHECK_EQ(book.take_rest().size(), std::size_t{1});
  CHECK(book.rest().empty());
}

// Requests that are cached overtake those that are not, within a round.
TEST(elastic_commit_hands_out_what_stands_behind_it_in_its_round) {
  CommitBook book;
  book.hold(booked(Kind::kCommit, "commit", "step"), kAll);
  book.hold(booked(Kind::kAllgather, "rows", "step"), kAll);
  CHECK_EQ(book.rest().size(), std::size_t{2});
  book.end_round();
  const auto handed_out = book.complete(0);
  CHECK_EQ(handed_out.size(), std::size_t{2});
  CHECK_EQ(handed_out[1]->request.name, std::string("commit"));
  CHECK(book.rest().empty());
}

TEST(elastic_book_counts_each_process_set_by_itself) {
  CommitBook book;
  book.hold(booked(Kind::kAllreduce, "x", "", 7), kAll);
  book.hold(booked(Kind::kAllreduce, "y", "", 3), kAll);
  book.hold(booked(Kind::kAllreduce, "z", "", 3), kAll);
  CHECK_EQ(book.due_sets(), std::vector<std::uint32_t>{3, 7});
  CHECK_EQ(book.complete(3).size(), std::size_t{2});
  CHECK_EQ(book.due_sets(), std::vector<std::uint32_t>{7});
  CHECK(book.counts() == CommitCounts{{3, 1}});
  CHECK_EQ(book.complete(7).size(), std::size_t{1});
  commit_one(book, 3);
  CHECK(book.counts() == CommitCounts{{3, 2}, {7, 1}});
}

TEST(elastic_cut_hands_out_the_commit_in_progress_and_nothing_else) {
  for (const std::uint64_t commit_point : {1, 2, 3}) {
    CommitBook book;
    commit_one(book);
    commit_one(book, 5);
    book.hold(booked(Kind::kAllreduce, "due"), kAll);
    book.hold(booked(Kind::kAllreduce, "held", "step"), kAll);
    book.hold(booked(Kind::kAllreduce, "of 5", "", 5), kAll);
    const auto handed_out = book.complete_up_to({{0, commit_point}});
    CHECK_EQ(handed_out.size(), std::size_t{commit_point >= 2});
    CHECK_EQ(book.take_rest().size(), std::size_t{commit_point >= 2 ? 2U : 3U});
  }
}

TEST(elastic_counts_of_members_that_had_joined_meet_those_of_the_others_again) {
  CommitBook worked, joined;
  commit_one(worked);
  commit_one(joined);
  commit_one(worked);
  commit_one(worked, 4);
  CHECK(worked.counts().at(0) > joined.counts().at(0));
  commit_join(worked);
  commit_join(joined);
  CHECK_EQ(worked.counts().at(0), joined.counts().at(0));
  commit_one(worked, 4);
  commit_one(joined, 4);
  CHECK_EQ(worked.counts().at(4), joined.counts().at(4));
  CHECK(worked.counts().at(4) > worked.counts().at(0));
}

TEST(elastic_cut_of_a_join_in_progress) {
  // One member has completed the join, another has not, and had missed commits before.
  CommitBook first, second, third;
  for (int i = 0; i < 3; ++i) commit_one(first);
  commit_one(first, 2);
  commit_one(second, 2);
  commit_join(first);
  second.hold(booked(Kind::kJoin, std::string(kJoinName)), kAll);
  second.hold(booked(Kind::kAllreduce, "behind", "", 2), kAll);
  third.hold(booked(Kind::kJoin, std::string(kJoinName)), kAll);
  const auto handed_out = second.complete_up_to(first.counts());
  CHECK_EQ(handed_out.size(), std::size_t{1});
  CHECK(handed_out[0]->request.kind == Kind::kJoin);
  CHECK_EQ(second.take_rest().size(), std::size_t{1});
  // Nobody has completed it: commits before the join do not hand it out.
  CommitBook other;
  for (int i = 0; i < 9; ++i) commit_one(other);
  CHECK(third.complete_up_to(other.counts()).empty());
}

TEST(elastic_book_drops_what_a_removed_set_holds) {
  CommitBook book;
  book.hold(booked(Kind::kAllreduce, "a", "step", 3), kAll);
  book.hold(booked(Kind::kAllreduce, "b", "step"), kAll);
  CHECK_EQ(book.drop(3).size(), std::size_t{1});
  CHECK(book.drop(3).empty());
  CHECK_EQ(book.take_rest().size(), std::size_t{1});
}
